# SPDX-License-Identifier: Apache-2.0
"""The Python half of ddipd's worker processes: ranks, stores, and the template they come from."""
