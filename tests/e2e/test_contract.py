# SPDX-License-Identifier: Apache-2.0
"""What proto/ and docs/ promise, against the code and against what the real daemon answers."""

import contextlib
import http.client
import json
import os
import pickle
import re
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml
from conftest import ROOT, Reply, UnixConnection, in_time
from openapi_spec_validator import validate as validate_openapi
from referencing import Registry
from referencing.jsonschema import DRAFT202012

PROTO = ROOT / "proto"
SPEC = yaml.safe_load((PROTO / "openapi.yaml").read_text())
EVENT = json.loads((PROTO / "events.schema.json").read_text())
REGISTRY = Registry().with_resources(
    (name, DRAFT202012.create_resource(schema))
    for name, schema in (("openapi.yaml", SPEC), ("events.schema.json", EVENT))
)
METHODS = ("get", "put", "post", "delete", "patch", "head", "options")
CODE = {"Content-Type": "text/x-python"}
JSON = {"Content-Type": "application/json"}
PICKLE = {"Content-Type": "application/x-pickle"}
ASYNC = {"Prefer": "respond-async"}


def text_of(path):
    return (ROOT / path).read_text()


def shape(path):
    """An OpenAPI path as daemon/api.c writes it: /v1/groups/{g}/cells/{c}."""
    return re.sub(r"\{(\w)\w*\}", r"{\1}", path)


def routes():
    """The rows of the table of daemon/api.c: (method, path, op or None, body, open)."""
    row = re.compile(r'\{"(\w+)", "([^"]+)", (NULL|"\w+"), \w+,\s*API_BODY_(\w+),\s*(true|false)\}')
    table = text_of("daemon/api.c").partition("api_routes[] = {")[2].partition("\n};")[0]
    found = [
        (method, path, None if op == "NULL" else op.strip('"'), body, opened == "true")
        for method, path, op, body, opened in row.findall(table)
    ]
    assert len(found) == table.count('{"'), "a row that this pattern does not read"
    return found


def full(path):
    """The other way round."""
    return path.replace("{g}", "{group}").replace("{c}", "{cell}").replace("{n}", "{name}")


def operations():
    """{(method, path as in api.c): operation} of openapi.yaml."""
    return {
        (method.upper(), shape(path)): item[method]
        for path, item in SPEC["paths"].items()
        for method in METHODS
        if method in item
    }


def rows(path, columns=None):
    """The rows of a document's tables as lists of cells, without heads."""
    found = []
    for line in text_of(path).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and not set(line) <= set("|-: "):
            found.append(cells)
    return [row for row in found if columns is None or len(row) == columns]


# --- validating ---------------------------------------------------------------------------------


def check(schema, value):
    """schema: of openapi.yaml, its references relative to that file."""
    if isinstance(schema, dict) and schema.get("$ref", "").startswith("#"):
        schema = {"$ref": f"openapi.yaml{schema['$ref']}"}
    elif isinstance(schema, dict):
        schema = {"$id": "openapi.yaml", **SPEC, **schema}
    jsonschema.Draft202012Validator(schema, registry=REGISTRY).validate(value)


def check_event(event):
    """By the part of the schema for its type, for a message that says what is wrong."""
    assert event["type"] in EVENT["$defs"], event
    part = {"$ref": f"events.schema.json#/$defs/{event['type']}"}
    jsonschema.Draft202012Validator(part, registry=REGISTRY).validate(event)
    assert is_event(event), event


def is_event(event):
    whole = jsonschema.Draft202012Validator({"$ref": "events.schema.json"}, registry=REGISTRY)
    return whole.is_valid(event)


def resolved(thing):
    while "$ref" in thing:
        found = SPEC
        for part in thing["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        thing = found
    return thing


def events_of(content_type, text):
    if content_type == "application/x-ndjson":
        return [json.loads(line) for line in text.splitlines()]
    blocks = [block.splitlines() for block in text.split("\n\n") if block]
    found = []
    for ident, kind, data in blocks:
        found.append(json.loads(data.removeprefix("data: ")))
        assert ident == f"id: {found[-1]['seq']}" and kind == f"event: {found[-1]['type']}"
    return found


def check_body(content, content_type, reply):
    bare = content_type.partition(";")[0]
    assert bare in content, f"{content_type} is not declared, {sorted(content)} are"
    schema = content[bare]["schema"]
    if bare.endswith("json") and bare != "application/x-ndjson":
        check(schema, reply.json)
    elif bare in ("application/x-ndjson", "text/event-stream"):
        for event in events_of(bare, reply.text):
            check_event(event)
    elif bare == "text/plain":
        check(schema, reply.text)


def check_reply(response, reply):
    """An answer against a declared response: headers, content type, body."""
    response = resolved(response)
    for name, header in response.get("headers", {}).items():
        header, value = resolved(header), reply.headers.get(name.lower())
        assert value or not header.get("required"), f"{name} is missing: {reply.headers}"
        if value:
            check(header["schema"], value)
    check_body(response["content"], reply.headers["content-type"], reply)
    if reply.status >= 400:
        assert reply.json["status"] == reply.status


class Caller:
    """Calls, each checked against its operation; remembers which statuses it has seen."""

    def __init__(self, daemon):
        self.daemon = daemon
        self.seen = set()

    def __call__(self, status, method, path, body=None, headers=None, **at):
        """path: as in openapi.yaml, with a query perhaps; at: what its {names} stand for."""
        bare = path.partition("?")[0]

        def ask():
            return self.daemon.request(method, path.format(**at), body, headers)

        aside = path.endswith(("complete", "inspect", "wait=false"))
        reply = in_time(ask) if aside else ask()
        assert reply.status == status, f"{method} {path}: {reply.status} {reply.text}"
        declared = SPEC["paths"][bare][method.lower()]["responses"]
        assert str(status) in declared, f"{method} {bare}: {status} is not declared"
        check_reply(declared[str(status)], reply)
        if bare != "/v1/ws":
            assert reply.headers["cache-control"] == "no-store"
        self.seen.add((method, bare, status))
        return reply


@pytest.fixture
def call(daemon):
    return Caller(daemon)


def test_the_validator_bites():
    for schema in ("Group", "Cell", "AcceptedCell", "Info", "Gpus", "Namespace", "Problem"):
        with pytest.raises(jsonschema.ValidationError):
            check({"$ref": f"#/components/schemas/{schema}"}, {})
    listed = operations()["GET", "/v1/groups"]["responses"]["200"]["content"]
    with pytest.raises(jsonschema.ValidationError):
        check(listed["application/json"]["schema"], {"groups": [{"name": "x"}]})


# --- (a) the documents among each other and against the tables of the code ------------------------


def test_openapi_is_valid():
    validate_openapi(SPEC, base_uri=(PROTO / "openapi.yaml").as_uri())
    jsonschema.Draft202012Validator.check_schema(EVENT)


def test_openapi_has_the_routes_of_the_code():
    declared, table = operations(), routes()
    assert set(declared) == {(method, path) for method, path, *_ in table}
    for method, path, op, body, opened in table:
        operation = declared[method, path]
        assert operation.get("x-websocket-op") == op, (method, path)
        assert (operation.get("security") == []) == opened, (method, path)
        assert body != "NONE" or "requestBody" not in operation, (method, path)
        if not opened:
            assert {"401", "403"} <= set(operation["responses"]), (method, path)
        if "{g}" in path:
            assert "404" in operation["responses"], (method, path)
        if body != "NONE":
            assert "413" in operation["responses"], (method, path)
    names = [operation["operationId"] for operation in declared.values()]
    assert len(set(names)) == len(names)
    for operation in declared.values():
        assert operation["operationId"] == operation.get("x-websocket-op", operation["operationId"])


def test_protocol_has_the_ops_of_the_code():
    documented = [(op, call) for op, call in rows("proto/protocol.md", 2) if "/v1/" in call]
    assert sorted(documented) == sorted(
        (op, f"{method} {path}") for method, path, op, *_ in routes() if op
    )


def test_protocol_has_the_frames_of_the_code():
    header = text_of("proto/frame.h")
    types = dict(re.findall(r"FRAME_(\w+) = (\d+),", header.partition("enum frame_type")[2]))
    types.pop("OK", None), types.pop("MORE", None)
    table = [row for row in rows("proto/protocol.md", 7) if row[0].isdecimal()]
    assert {row[1]: row[0] for row in table} == types
    to_rank = {row[1] for row in table if row[2] == "daemon"}
    assert to_rank == {name for name, number in types.items() if int(number) >= 16}
    fields = [row for row in rows("proto/protocol.md", 4) if row[0].isdecimal()]
    comment = re.findall(r"(\d+) (\w+) u\d+", header)
    assert [(row[0], row[2]) for row in fields if row[1]] == comment


def test_api_document_lists_the_calls():
    documented = [row[0] for row in rows("docs/api.md", 4) if "/" in row[0] and " " in row[0]]
    assert documented[0] == "GET /healthz"
    assert sorted(documented) == sorted(f"{method} {path}" for method, path, *_ in routes())
    events = {name for row in rows("docs/api.md", 2) for name in row[0].split(", ")}
    assert {ref["$ref"].rpartition("/")[2] for ref in EVENT["oneOf"]} <= events


# --- (b) answers ----------------------------------------------------------------------------------


def test_daemon_calls(call):
    for path in ("/healthz", "/readyz"):
        call(200, "GET", path)
    info = call(200, "GET", "/v1/info").json
    assert info["pid"] == call.daemon.pid
    call(200, "GET", "/v1/gpus")
    call(200, "GET", "/v1/groups")
    call(426, "GET", "/v1/ws")
    for path, method in (("/healthz", "PUT"), ("/v1/groups", "PATCH"), ("/v1/ws", "POST")):
        reply = call.daemon.request(method, path)
        assert reply.status == 405
        check_reply({"$ref": "#/components/responses/MethodNotAllowed"}, reply)
    reply = call.daemon.request("GET", "/v1/nothing")
    assert reply.status == 404
    check_reply({"$ref": "#/components/responses/NotFound"}, reply)
    call(403, "GET", "/v1/info", headers={"Origin": "http://elsewhere.example"})
    call(403, "GET", "/healthz", headers={"Origin": "http://elsewhere.example"})


def test_gpus_as_they_are_listed(start_daemon, build):
    fakes = build / "fakes"
    if not fakes.exists():
        pytest.fail("the fakes are not built: make unit")
    names = ("cudart", "nvml", "nccl")
    daemon = start_daemon(*(f"--{n}-library={fakes}/lib{n}_fake.so" for n in names))
    call = Caller(daemon)
    assert len(call(200, "GET", "/v1/gpus").json["gpus"]) == 4
    assert call(200, "GET", "/v1/info").json["cuda"]["available"]
    for gpus in ([9], ["GPU-00000000"], [0, 0], [], 3):
        call(422, "POST", "/v1/groups", {"gpus": gpus})


def test_group_calls(call, group):
    one = {"group": group}
    assert call(200, "GET", "/v1/groups").json["groups"]
    call(200, "GET", "/v1/groups/{group}", **one)
    call(200, "POST", "/v1/groups/{group}/restart?ranks=1", **one)
    call(200, "POST", "/v1/groups/{group}/interrupt", **one)
    call(400, "POST", "/v1/groups/{group}/interrupt", "{", JSON, **one)
    call(422, "POST", "/v1/groups/{group}/interrupt", {"cell": "x"}, **one)
    call(400, "POST", "/v1/groups/{group}/restart", "{", JSON, **one)
    call(422, "POST", "/v1/groups/{group}/restart?ranks=7", **one)
    for accept in ("application/json", "text/plain"):
        reply = call(200, "GET", "/v1/groups/{group}/stacks", headers={"Accept": accept}, **one)
        assert reply.headers["content-type"].startswith(accept)
    call(200, "GET", "/v1/groups/{group}/stacks?ranks=1", **one)
    call(422, "GET", "/v1/groups/{group}/stacks?ranks=2", **one)
    call(406, "GET", "/v1/groups/{group}/stacks", headers={"Accept": "image/png"}, **one)
    call(409, "POST", "/v1/groups", {"ranks": 2, "name": group})
    call(400, "POST", "/v1/groups", "{")
    call(422, "POST", "/v1/groups", {})
    call(422, "POST", "/v1/groups", {"ranks": 1, "name": "x", "python": "/no/such/python"})
    key = {"Idempotency-Key": f"contract-{group}"}
    made = call(201, "POST", "/v1/groups", {"ranks": 1, "name": f"{group}-two"}, key).json
    again = call(201, "POST", "/v1/groups", {"ranks": 1, "name": f"{group}-two"}, key).json
    assert made["ranks"] == again["ranks"]
    call(409, "POST", "/v1/groups", {"ranks": 2, "name": f"{group}-two"}, key)
    assert call(200, "DELETE", "/v1/groups/{group}", group=f"{group}-two").json["state"] == "gone"
    body = {"ranks": 1, "name": f"{group}-later", "wait": False}
    assert call(202, "POST", "/v1/groups", body).json["state"] == "starting"
    call(202, "POST", "/v1/groups/{group}/restart", headers=ASYNC, **one)
    call(409, "POST", "/v1/groups/{group}/restart", **one)
    for method, path in operations():
        if "{g}" in path:
            headers = CODE if path.endswith("cells") else JSON
            call(404, method, full(path), "{}", headers, group="absent", cell=1, name="x")
    call(200, "DELETE", "/v1/groups/{group}", group=f"{group}-later")


def test_cell_calls(call, group):
    one = {"group": group}
    cells = "/v1/groups/{group}/cells"
    for accept in ("application/x-ndjson", "application/json", "text/event-stream", "text/plain"):
        headers = {**CODE, "Accept": accept}
        reply = call(200, "POST", cells, b"print(rank); rank", headers, **one)
        assert reply.headers["content-type"].startswith(accept)
        where = {"group": group, "cell": reply.headers["location"].rpartition("/")[2]}
        replay = call(200, "GET", f"{cells}/{{cell}}/events", headers=headers, **where)
        assert replay.body == reply.body
    call(200, "POST", f"{cells}?ranks=1", {"code": "rank", "silent": True}, **one)
    key = {**ASYNC, "Idempotency-Key": "a key"}
    slow = {"code": "import time; time.sleep(0.5)"}
    first = call(202, "POST", cells, slow, key, **one).json
    assert call(202, "POST", cells, slow, key, **one).json["cell"] == first["cell"]
    call(409, "POST", cells, {"code": "2"}, key, **one)
    queued = call(202, "POST", cells, b"1", {**CODE, **ASYNC}, **one).json
    where = {"group": group, "cell": queued["cell"]}
    assert call(200, "GET", f"{cells}/{{cell}}", **where).json["state"] == "queued"
    call(200, "POST", "/v1/groups/{group}/interrupt", {"cell": queued["cell"]}, **one)
    call(200, "GET", f"{cells}/{{cell}}/events?after=3", headers={"Last-Event-ID": "1"}, **where)
    assert call(200, "GET", f"{cells}/{{cell}}", **where).json["status"] == "interrupted"
    assert len(call(200, "GET", cells, **one).json["cells"]) >= 7
    call(404, "GET", f"{cells}/{{cell}}", group=group, cell=99)
    call(404, "GET", f"{cells}/{{cell}}/events", group=group, cell="x")
    call(422, "GET", f"{cells}/{{cell}}/events?after=99999", **where)
    call(422, "GET", "/v1/groups/{group}/events?after=x", **one)
    call(400, "POST", cells, b"\xff", CODE, **one)
    call(415, "POST", cells, b"1", {"Content-Type": "image/png"}, **one)
    call(422, "POST", cells, b"", CODE, **one)
    call(422, "POST", f"{cells}?ranks=9", b"1", CODE, **one)
    response, connection = call.daemon.open("GET", f"/v1/groups/{group}/events?after=0")
    with contextlib.closing(connection):
        for _ in range(5):
            check_event(json.loads(response.readline()))


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream", "text/plain"])
def test_events_of_a_group_in_each_form(daemon, group, accept):
    """They are endless: read until the group goes."""
    daemon.run(group, "print('one')")
    response, connection = daemon.open(
        "GET", f"/v1/groups/{group}/events", headers={"Accept": accept}
    )
    daemon.delete(group)
    with contextlib.closing(connection):
        reply = Reply(response)
    declared = operations()["GET", "/v1/groups/{g}/events"]["responses"]["200"]
    check_reply(declared, reply)
    forms = {"application/json": "application/x-ndjson"}
    assert reply.headers["content-type"].startswith(forms.get(accept, accept))
    assert "one" in reply.text


def test_namespace_calls(call, group):
    one, base = {"group": group}, "/v1/groups/{group}/namespace"
    named, x = f"{base}/{{name}}", {"group": group, "name": "x"}
    import numpy

    array = call.daemon.folder / "a.npy"
    numpy.save(array, numpy.arange(3))
    bodies = {
        "application/json": b'{"a": 1}',
        "text/plain": "grüße".encode(),
        "application/x-npy": array.read_bytes(),
        "application/x-pickle": pickle.dumps({1, 2}),
    }
    for kind, body in bodies.items():
        call(200, "PUT", named, body, {"Content-Type": kind}, **x)
        reply = call(200, "GET", f"{named}?rank=1", headers={"Accept": kind}, **x)
        assert reply.headers["content-type"] == kind
    assert call(200, "GET", named, **x).headers["content-type"] == "text/plain"
    call(200, "PUT", named, b"1", JSON, **x)
    assert call(200, "GET", named, **x).headers["content-type"] == "application/json"
    variables = call(200, "GET", f"{base}?rank=1", **one).json["variables"]
    assert [row["name"] for row in variables] == ["rank", "world_size", "x"]
    put = call(200, "POST", f"{base}?ranks=0", pickle.dumps({"a": 1, "b": 2}), PICKLE, **one)
    assert put.json["names"] == ["a", "b"] and put.json["ranks"] == [0]
    got = call(200, "POST", base, {"pull": ["a", "b"]}, JSON, **one)
    assert got.headers["content-type"] == "application/x-pickle"
    call(200, "DELETE", f"{named}?ranks=0", group=group, name="a")
    call(404, "DELETE", named, group=group, name="a")
    call(404, "GET", named, group=group, name="a")
    call(404, "POST", base, {"pull": ["absent"]}, JSON, **one)
    call(400, "POST", base, "{", JSON, **one)
    call(406, "GET", named, headers={"Accept": "image/png"}, **x)
    for method, path in (("PUT", named), ("POST", base)):
        call(415, method, path, b"x", {"Content-Type": "a/b"}, **x)
    call(422, "POST", base, pickle.dumps([1]), PICKLE, **one)
    call(422, "PUT", named, b"{", JSON, **x)
    call(422, "GET", named, group=group, name="1x")
    call(422, "GET", f"{base}?rank=9", **one)
    call(200, "GET", f"{base}?wait=false", **one)
    call(422, "GET", f"{base}?wait=no", **one)
    raised = call(422, "PUT", named, b"garbage", PICKLE, **x).json
    assert raised["title"] == "A rank raised an exception" and raised["error"]["ename"]
    for question in ({"code": "wor"}, {"code": "world_size", "cursor_pos": 3, "rank": 1}, {}):
        call(200, "POST", "/v1/groups/{group}/complete", question, **one)
        call(200, "POST", "/v1/groups/{group}/inspect", question, **one)
    for path in ("/v1/groups/{group}/complete", "/v1/groups/{group}/inspect"):
        call(400, "POST", path, "{", **one)
        call(422, "POST", path, {"cursor_pos": -1}, **one)
        assert "more than 1048576" in call(413, "POST", path, {"code": "x" * 1048577}, **one).text


def test_answers_of_a_degraded_group(call, group):
    reply = call.daemon.cell(group, "import os\nif rank: os._exit(3)")
    assert reply.events[-1]["status"] == "lost"
    one = {"group": group, "name": "rank"}
    found = call(200, "GET", "/v1/groups/{group}", **one).json
    assert found["state"] == "degraded" and "exit code 3" in found["reason"]
    call(409, "POST", "/v1/groups/{group}/cells", b"1", CODE, **one)
    for method, path in operations():
        if "namespace" in path and method == "GET":
            call(200, method, full(path), **one)
            call(409, method, full(path) + "?rank=1", **one)
        elif "namespace" in path:
            call(409, method, full(path), b"{}", PICKLE, **one)
        elif path.endswith(("complete", "inspect")):
            call(200, method, full(path), {"code": "ra"}, **one)
            call(409, method, full(path), {"code": "ra", "rank": 1}, **one)
    call(200, "POST", "/v1/groups/{group}/restart?ranks=1", **one)
    call.daemon.cell(group, "import os, time; time.sleep(0.5); os._exit(3)", **ASYNC)
    call(503, "GET", "/v1/groups/{group}/namespace/{name}", **one)


def test_limits(start_daemon):
    limits = ("--body-limit=4K", "--payload-limit=4K", "--queue-limit=2", "--group-limit=1")
    daemon = start_daemon(*limits)
    call, one = Caller(daemon), {"group": "default"}
    call(201, "POST", "/v1/groups", {"ranks": 1})
    call(503, "POST", "/v1/groups", {"ranks": 1, "name": "more"})
    cells = "/v1/groups/{group}/cells"
    for (method, path), operation in operations().items():
        if "413" in operation["responses"]:
            at = {"group": "default", "name": "x"}
            call(413, method, full(path), b"#" * 5000, CODE, **at)
            call(413, method, full(path), iter([b"#" * 2500] * 2), CODE, **at)
    slow = daemon.cell("default", "import time; time.sleep(1)", **ASYNC)
    time.sleep(0.2)
    for _ in range(2):
        daemon.cell("default", "1", **ASYNC)
    call(503, "POST", cells, b"1", CODE, **one)
    call(503, "GET", "/v1/groups/{group}/namespace", **one)
    call(503, "PUT", "/v1/groups/{group}/namespace/{name}", b"1", JSON, **one, name="x")
    daemon.request("GET", slow.headers["location"] + "/events")


def test_record_that_is_gone(call, group):
    """1000 records are kept."""
    one = {"group": group}
    key = {**CODE, **ASYNC, "Idempotency-Key": "the first"}
    call(202, "POST", "/v1/groups/{group}/cells", b"1", key, **one)
    connection = UnixConnection(call.daemon.socket)
    with contextlib.closing(connection):
        for _ in range(1005):
            path = f"/v1/groups/{group}/cells?ranks=0"
            connection.request("POST", path, b"1", {**CODE, **ASYNC})
            accepted = json.loads(connection.getresponse().read())
    where = f"/v1/groups/{group}/cells/{accepted['cell']}/events"
    assert call.daemon.request("GET", where).events[-1]["type"] == "done"
    call.daemon.run(group, "1")
    call(410, "GET", "/v1/groups/{group}/cells/{cell}", cell=1, **one)
    call(410, "GET", "/v1/groups/{group}/cells/{cell}/events", cell=1, **one)
    call(410, "POST", "/v1/groups/{group}/cells", b"1", key, **one)
    assert len(call(200, "GET", "/v1/groups/{group}/cells", **one).json["cells"]) == 1000
    response, connection = call.daemon.open("GET", f"/v1/groups/{group}/events")
    with contextlib.closing(connection):
        kept = [json.loads(response.readline()) for _ in range(6)]
    assert [event["cell"] for event in kept if event["cell"]][0] == 1


def test_group_that_is_late(start_daemon, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 2\n")
    python.chmod(0o755)
    daemon = start_daemon("--start-timeout-s=1")
    call = Caller(daemon)
    call(504, "POST", "/v1/groups", {"ranks": 1, "python": str(python)})


def test_state_folder_that_takes_nothing(start_daemon):
    daemon = start_daemon()
    daemon.create(ranks=1)
    daemon.delete("default")
    (daemon.state_dir / "groups").rmdir()
    (daemon.state_dir / "groups").write_text("")
    Caller(daemon)(500, "POST", "/v1/groups", {"ranks": 1})
    (daemon.state_dir / "groups").unlink()


def test_strangers_are_answered_as_declared(daemon):
    """Every call that needs a token says so in the same way, and so for web pages of others."""
    host, port = daemon.url.removeprefix("http://").rsplit(":", 1)
    token = {"Authorization": f"Bearer {daemon.token}"}
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    for (method, path), operation in operations().items():
        strangers = {401: {}, 403: {**token, "Origin": "http://elsewhere.example"}}
        for status, headers in strangers.items():
            if status == 401 and operation.get("security") == []:
                continue
            headers = {**headers, **(upgrade if path == "/v1/ws" else {})}
            connection = http.client.HTTPConnection(host, int(port), timeout=10)
            with contextlib.closing(connection):
                connection.request(method, re.sub(r"\{.\}", "1", path), headers=headers)
                reply = Reply(connection.getresponse())
            assert reply.status == status, (method, path, reply.text)
            check_reply(operation["responses"][str(status)], reply)
            if status == 401 and path != "/v1/ws":
                assert reply.headers["www-authenticate"] == "Bearer", path


def test_shutdown_is_declared(start_daemon):
    daemon = start_daemon()
    Caller(daemon)(202, "POST", "/v1/shutdown")
    assert daemon.process.wait(10) == 0
    daemon.process = None


def test_websocket_answers_are_those_of_http(daemon, group):
    """Each op: its answer's body by the schema of its call, and every status declared."""
    from ddip.transport import Endpoint, WebSocket

    declared = {
        operation["x-websocket-op"]: operation["responses"]
        for operation in operations().values()
        if "x-websocket-op" in operation
    }
    socket = WebSocket(Endpoint(path=daemon.socket))

    def ask(op, **members):
        socket.send({"id": [op], "op": op, "group": group, **members})
        while True:
            answer = socket.receive(60)
            if "seq" in answer:
                check_event(answer)
                continue
            assert answer["id"] == [op] and set(answer) == {"id", "status", "body"}
            return answer["status"], answer["body"]

    def body_schema(op, status):
        content = resolved(declared[op][str(status)])["content"]
        return next(v for k, v in content.items() if "json" in k and "nd" not in k)["schema"]

    asked = set()
    for op, status, members in (
        ("info", 200, {}),
        ("gpus", 200, {}),
        ("groups_list", 200, {}),
        ("group_get", 200, {}),
        ("group_get", 404, {"group": "absent"}),
        ("execute", 202, {"code": "print(rank)", "ranks": [1]}),
        ("execute", 422, {"code": "1", "ranks": [9]}),
        ("cells_list", 200, {}),
        ("cell_get", 200, {"cell": 1}),
        ("cell_get", 404, {"cell": 99}),
        ("stacks", 200, {"ranks": [1]}),
        ("stacks", 422, {"ranks": [9]}),
        ("namespace_list", 200, {"rank": 1}),
        ("namespace_list", 200, {"wait": False}),
        ("namespace_list", 422, {"wait": 1}),
        ("namespace_delete", 404, {"name": "absent"}),
        ("complete", 200, {"code": "wor"}),
        ("inspect", 200, {"code": "rank", "rank": 1}),
        ("group_interrupt", 200, {}),
        ("group_restart", 200, {"ranks": [1]}),
        ("group_create", 422, {"name": "other"}),
        ("group_create", 202, {"name": "other", "ranks": 1, "wait": False}),
        ("group_delete", 200, {"group": "other"}),
    ):
        got, body = ask(op, **members)
        while got == 504 and op in ("complete", "inspect", "namespace_list"):
            got, body = ask(op, **members)  # a loaded machine; pytest-timeout ends it
        assert got == status, (op, got, body)
        check(body_schema(op, status), body)
        asked.add(op)
    assert ask("cell_events", cell=1) == (200, {})
    assert ask("group_events", after=0) == (200, {})
    asked |= {"cell_events", "group_events", "shutdown"}
    assert asked == set(declared)
    socket.send({"op": "nothing"})
    while "seq" in (answer := socket.receive(10)):
        check_event(answer)
    assert answer["id"] is None and answer["status"] == 404
    socket.close()


# --- (c) events -----------------------------------------------------------------------------------

EVERYTHING = """
import os, sys, gc
from IPython.display import display, clear_output, HTML
print("text"); print("error text", file=sys.stderr); os.write(1, b"from a pipe\\n")
shown = display(HTML("<b>1</b>"), display_id=True)
shown.update(HTML("<b>2</b>"))
clear_output(wait=True)
from ddip_worker.lib import Library
library = next(o for o in gc.get_objects() if isinstance(o, Library))
library.post(7, {"dropped_events": 3, "dropped_bytes": 1024}, 1)
rank
"""


@pytest.fixture(scope="module")
def journal(daemon):
    """The events of a group that has seen every type, and died a little."""
    daemon.create(name="types")
    daemon.cell("types", EVERYTHING)
    daemon.cell("types", "1/0")
    daemon.request(
        "POST", "/v1/groups/types/cells", {"code": "import time; time.sleep(9)", "timeout_s": 0.2}
    )
    first = daemon.cell("types", "time.sleep(9)", **ASYNC)
    second = daemon.cell("types", "never", **ASYNC)
    daemon.request("POST", "/v1/groups/types/interrupt", {"cell": second.json["cell"]})
    daemon.request("POST", "/v1/groups/types/interrupt")
    daemon.request("GET", first.headers["location"] + "/events")
    daemon.cell("types", "import os; rank and os._exit(3)")
    daemon.request("POST", "/v1/groups/types/restart", timeout=60)
    daemon.cell("types", "import time; time.sleep(60)", **ASYNC)
    daemon.request("POST", "/v1/groups/types/restart", timeout=60)
    response, connection = daemon.open("GET", "/v1/groups/types/events?after=0")
    daemon.delete("types")
    with contextlib.closing(connection):
        return [json.loads(line) for line in response]


def test_every_event_is_as_promised(journal):
    for event in journal:
        check_event(event)
    assert [event["seq"] for event in journal] == list(range(1, len(journal) + 1))
    types = {ref["$ref"].rpartition("/")[2] for ref in EVENT["oneOf"]}
    assert {event["type"] for event in journal} == types
    errors = {event["ename"] for event in journal if event["type"] == "error"}
    assert {"ZeroDivisionError", "KeyboardInterrupt", "RankDied", "CellLost"} <= errors
    states = {e["execution_state"] for e in journal if e["type"] == "status"}
    assert states == {"queued", "busy", "starting", "ready", "degraded", "stopping"}
    outcomes = {event["status"] for event in journal if event["type"] == "done"}
    assert outcomes == {"ok", "error", "interrupted", "lost"}
    for cell in {event["cell"] for event in journal} - {None}:
        own = [event for event in journal if event["cell"] == cell]
        assert own[0]["type"] == "execute_input"
        # a rank that is being restarted may say more than the daemon waited for
        types = [event["type"] for event in own if "rank_seq" not in event]
        assert types[-1] == "done" and types.count("done") == 1


def broken_versions(event):
    """What must not pass: a missing, an unknown or a wrong member."""
    rich = event["type"] in ("display_data", "update_display_data", "execute_result")
    of_rank = "rank_seq" in event and event["type"] not in ("stream", "rank_done")
    optional = ("reason", "position", "rank_seq", "pipe_end", "dropped_bytes")
    optional += ("silent", "store_history", "execution_count", "timeout_s", "app_command")
    for name in event:
        if name not in optional or (name == "execution_count" and rich):
            yield f"without {name}", {k: v for k, v in event.items() if k != name}
    yield "type", {**event, "type": "nonsense"}
    yield "seq", {**event, "seq": 0}
    yield "time", {**event, "time": "now"}
    yield "group", {**event, "group": "no/slash"}
    yield "cell", {**event, "cell": "1"}
    yield "rank", {**event, "rank": -1}
    if not of_rank and not (rich or event["type"] in ("clear_output", "error")):
        yield "unknown", {**event, "surprise": 1}
    for name, wrong in (
        ("status", "fine"),
        ("execution_state", "dreaming"),
        ("name", "stdlog"),
        ("text", ""),
        ("code", None),
        ("ranks", []),
        ("data", "text"),
        ("wait", "yes"),
        ("traceback", "text"),
        ("duration_s", -1),
        ("memory", {}),
        ("dropped_events", -1),
        ("generation", 0),
        ("execution_count", "1"),
    ):
        if name in event:
            yield name, {**event, name: wrong}


def test_the_schema_rejects_broken_events(journal):
    seen = {}
    for event in journal:
        seen.setdefault((event["type"], "rank_seq" in event, event.get("execution_state")), event)
    tried = 0
    for event in seen.values():
        for what, broken in broken_versions(event):
            assert not is_event(broken), (what, broken)
            tried += 1
    assert tried > 150
    done = next(event for event in journal if event["type"] == "done")
    assert not is_event({**done, "rank": 0})
    assert not is_event({**done, "ranks": {"x": "ok"}})
    assert not is_event({**done, "rank_seq": 4})
    died = next(event for event in journal if event.get("ename") == "RankDied")
    assert not is_event({**died, "rank": None})


# --- (d) documents against the code ---------------------------------------------------------------


def settings():
    """The table of daemon/config.c: {name: (default, range, reload)}."""
    table = text_of("daemon/config.c").partition("config_options[] = {")[2].partition("\n};")[0]
    row = re.compile(
        r'(TEXT|NUMBER|SIZE)\((\w+), (NULL|"[^"]*"),\s*(?:(\S+), ([^,]+), )?(true|false),\s*"'
    )
    found = {}
    for kind, name, default, least, most, reload in row.findall(table):
        default = "" if default == "NULL" else default.strip('"')
        span = (least, most) if kind != "TEXT" else ()
        found[name] = (kind, default, span, reload == "true")
    assert len(found) == len(re.findall(r"^    (?:TEXT|NUMBER|SIZE)\(", table, re.M))
    return found


def number(text):
    """What 16M, 1024 and 1ull << 30 mean."""
    if shift := re.fullmatch(r"(\d+)ull << (\d+)", text):
        return int(shift[1]) << int(shift[2])
    digits, unit = re.fullmatch(r"(\d+)([KMG]?)", text).groups()
    return int(digits) << 10 * " KMG".index(unit or " ")


def test_operations_has_the_settings_of_the_code(build):
    table = {row[0]: row for row in rows("docs/operations.md", 5)}
    table.pop("setting")
    code = settings()
    assert list(table) == list(code)
    for name, (kind, default, span, reload) in code.items():
        _, documented, documented_span, documented_reload, meaning = table[name]
        if default:
            assert documented == default, name
        else:
            assert not documented or documented in ("see below", "*runtime_dir*/ddipd.sock"), name
        assert (documented_reload == "reload") == reload and meaning, name
        if kind != "TEXT":
            least, most = documented_span.split(" to ")
            assert (number(least), number(most)) == tuple(map(number, span)), name
    shown = subprocess.run([build / "ddipd", "--help"], capture_output=True, text=True).stdout
    flags = re.findall(r"^  (--[\w-]+) .*?(?:\[(.*)\])?$", shown, re.M)
    assert flags == [(f"--{n.replace('_', '-')}", row[1]) for n, row in code.items()]
    printed = subprocess.run([build / "ddipd", "--check-config"], capture_output=True, text=True)
    effective = dict(line.split(" = ", 1) for line in printed.stdout.splitlines())
    assert list(effective) == [name for name in code if name != "config"]


def sections(path):
    """{heading of level 2: its text}"""
    parts = re.split(r"^## (.+)$", text_of(path), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_magics_document_names_every_magic_and_flag():
    from ddip.magics import DdipMagics

    documented = sections("docs/magics.md")
    magics = [
        (kind, name, getattr(DdipMagics, function) if isinstance(function, str) else function)
        for kind, found in DdipMagics.magics.items()
        for name, function in found.items()
        if kind == "cell" or name not in DdipMagics.magics["cell"]  # %dip is in %%dip's section
    ]
    assert {"makedip", "dip", "autodip", "dipush", "dipull", "dipper"} <= {m[1] for m in magics}
    headings = {f"{'%%' if kind == 'cell' else '%'}{name}" for kind, name, _ in magics}
    assert headings == {name for name in documented if name.startswith("%")}
    for kind, name, function in magics:
        heading = f"{'%%' if kind == 'cell' else '%'}{name}"
        text = documented[heading]
        assert re.search(rf"^    {heading}\b", text, re.M), f"{heading}: no example"
        known = set()
        for action in getattr(getattr(function, "parser", None), "_actions", ()):
            known |= set(action.option_strings)
            for choice in action.choices or ():
                assert f"`{choice}`" in text, (heading, choice)
        stated = set(re.findall(r"`(--?[\w-]+)`", re.sub(r"`%\S+ .*?`", "", text)))
        assert known - {"-h", "--help"} <= stated, (heading, known - stated)
        table = {f for row in re.findall(r"^\| (`-.*?) \|", text, re.M) for f in row.split(", ")}
        assert {f.strip("`") for f in table} <= known, (heading, table)


def test_magics_document_names_the_python_api():
    import ddip

    text = sections("docs/magics.md")["The Python API"]
    public = [name for name in vars(ddip.Client) if not name.startswith("_")]
    for name in [*public, *ddip.__all__]:
        assert re.search(rf"`{name}\b|\b{name}\(|\b{name}`", text), name


def test_errors_document_has_every_status():
    codes = re.findall(r"^    (ERR_\w+)(?: = 0)?,", text_of("daemon/err.h"), re.M)
    table = re.findall(r'\{(ERR_\w+), (\d+), "([^"]+)"\}', text_of("daemon/api.c"))
    assert {code for code, *_ in table} == set(codes) - {"ERR_NONE"}
    documented = {(row[0], row[1]) for row in rows("docs/errors.md", 4) if row[0].isdecimal()}
    assert documented == {(status, title) for _, status, title in table}
    used = {
        status
        for operation in operations().values()
        for status in operation["responses"]
        if status >= "400"
    }
    assert used | {"405"} == {status for status, _ in documented}


def test_errors_document_quotes_the_code():
    """Each message of its tables is one that the code can say."""
    files = [*ROOT.glob("daemon/**/*.[ch]"), *ROOT.glob("daemon/worker/ddip_worker/**/*.py")]
    files += ROOT.glob("client/ddip/*.py")
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", f.read_text()) for f in sorted(files))
    code = re.sub(r"\s+", " ", code.replace('\\"', '"'))
    messages = 0
    for section, text in sections("docs/errors.md").items():
        for row in re.findall(r"^\| (.*) \|$", text, re.M) if section != "Statuses" else ():
            columns = row.split(" | ")
            quoted = columns[1] if columns[0].startswith(("error", "stream")) else columns[0]
            for message in re.findall(r"`([^`]+)`", quoted):
                messages += 1
                for piece in re.split(r"<\w+>", message):
                    piece = piece.strip(" \"'():;,.[]")
                    assert piece in code or len(piece) < 4, (message, piece)
    assert messages > 90


def test_documents_speak_of_files_that_are_there():
    for path in ("api", "apps", "ddip", "errors", "magics", "operations"):
        path = f"docs/{path}.md"
        for target in re.findall(r"\]\(([^)#:]+)", text_of(path)):
            assert (ROOT / path).parent.joinpath(target).exists(), (path, target)


# --- (e) examples ---------------------------------------------------------------------------------


def members(line):
    """The names in a line of JSON, and the type of an event."""
    found = json.loads(line)
    return list(found), found.get("type")


def test_the_examples_of_the_api_document(start_daemon):
    """In order, on a daemon of their own; each must succeed and answer what its text says."""
    daemon = start_daemon()
    environment = {
        **os.environ,
        "R": str(daemon.runtime_dir),
        "S": daemon.socket,
        "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    }
    text = text_of("docs/api.md")
    blocks = re.findall(r"^```sh\n(.*?)^```\n(?:```(\w+)\n(.*?)^```)?", text, re.M | re.S)
    assert len(blocks) > 20
    for script, language, told in blocks:
        command = ["bash", "-euc", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr, (script, done)
        assert done.stdout, script
        refused = '"type":"about:blank"'
        assert (refused in done.stdout) == (refused in told), (script, done.stdout)
        for line in told.splitlines() if language == "json" else ():
            if re.fullmatch(r"\{.*\}", line) and "..." not in line:
                assert members(line) in map(members, done.stdout.splitlines()), (line, done)
    assert daemon.request("GET", "/v1/groups").json == {"groups": []}
