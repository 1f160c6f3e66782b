# SPDX-License-Identifier: Apache-2.0
"""Downloads go to rank 0 first; the others then find the files. fastai has no hook for them."""

import functools

import fastdownload
import torch.distributed as dist
import torch.hub

from ddip_worker.apps.first import in_turn, rank0_first, turns


def install():
    """Before fastai and torchvision are imported, which copy these names."""
    _fetch_once(fastdownload.FastDownload)
    fastdownload.download_url = in_turn(fastdownload.download_url)
    torch.hub.load_state_dict_from_url = in_turn(torch.hub.load_state_dict_from_url)


def _fetch_once(downloader):
    """`untar_data` and all else that unpacks archives: asked to do it again, rank 0 does."""
    get = downloader.get

    @functools.wraps(get)
    def got(self, url, extract_key="data", force=False):
        force = force and (dist.get_rank() == 0 or not turns.shared())
        return rank0_first(get, self, url, extract_key=extract_key, force=force)

    downloader.get = got
