"""The requests that the tests' Hub answers: one function for each, in a table by method and path."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from urllib.parse import parse_qs, quote

import yaml

from tests.hub_server.handler import HubHandler, Refusal, Route
from tests.hub_server.repositories import Blob, entries, in_lfs, info


def tell(at: HubHandler, kind: str, repo: str, rev: str = "main") -> None:
    repository = at.repository(kind, repo)
    at.send_json(info(repository, at.commit_of(repository, rev), blobs="blobs" in at.query))


def tree(at: HubHandler, kind: str, repo: str, rev: str, path: str) -> None:
    commit = at.commit_of(at.repository(kind, repo), rev)
    listed = entries(commit, path, recursive=at.query.get("recursive", ["false"])[0].lower() in ("true", "1"))
    if path and not listed:
        raise Refusal(404, f"{path} does not exist on {rev!r}", "EntryNotFound")
    at.send_json(listed)


def paths_info(at: HubHandler, kind: str, repo: str, rev: str) -> None:
    asked = parse_qs(at.body.decode()).get("paths", ())
    listed = entries(at.commit_of(at.repository(kind, repo), rev))
    at.send_json([entry for entry in listed if entry["path"] in asked])


def auth_check(at: HubHandler, kind: str, repo: str, write: str) -> None:
    at.admitted(at.writable(kind, repo) if write else at.repository(kind, repo))
    at.send_json({})


def resolve(at: HubHandler, kind: str, repo: str, rev: str, file: str) -> None:
    """A file by its name: where its content is, and which content that is."""
    kind = kind or "model"
    repository = at.repository(kind, repo)
    at.admitted(repository)
    commit = at.commit_of(repository, rev)
    held = commit.files.get(file)
    if held is None:
        raise Refusal(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.oid})
    headers = {"X-Repo-Commit": commit.oid, "X-Linked-ETag": f'"{held.etag}"', "X-Linked-Size": str(len(held.content))}
    path = f"{kind}s/{repo}/{commit.oid}/{quote(file)}"
    if held.lfs:
        at.send(b"", 302, {**headers, "ETag": f'"{held.oid}"', "Location": f"{at.hub.cdn}/{path}?Signature=x"})
    else:
        at.send(b"", 307, {**headers, "Location": f"/api/resolve-cache/{path}"})


def content(at: HubHandler, kind: str, repo: str, rev: str, file: str) -> None:
    commit = at.hub.repositories[kind, repo].commits[rev]
    at.request_kept.repository, at.request_kept.file = repo, file
    at.send_content(commit.files[file], {"X-Repo-Commit": rev})


def small_content(at: HubHandler, kind: str, repo: str, rev: str, file: str) -> None:
    at.admitted(at.repository(kind, repo))
    content(at, kind, repo, rev, file)


def create(at: HubHandler) -> None:
    told = at.json()
    if at.user is None:
        raise Refusal(401, "Invalid username or password.")
    owner, kind = told["organization"] or at.user.name, told.get("type", "model")
    if not at.user.write or owner != at.user.name:
        raise Refusal(403, f"You don't have the rights to create a {kind} under the namespace {owner!r}.")
    name = f"{owner}/{told['name']}"
    address = f"{at.hub.url}/{'' if kind == 'model' else f'{kind}s/'}{name}"
    with at.hub.lock:
        if (kind, name) in at.hub.repositories:
            at.send_json({"error": f"You already created this {kind} repo", "url": address}, 409)
            return
        at.hub.add(name, {".gitattributes": ""}, kind=kind, private=told.get("visibility") == "private")
    at.send_json({"url": address, "name": name})


def validate_yaml(at: HubHandler) -> None:
    """The block of metadata above a card: YAML, and a mapping."""
    found = re.match(r"---\n(.*?\n)---(?:\n|$)", at.json()["content"], re.DOTALL)
    try:
        value = yaml.safe_load(found[1]) if found else {}
        wrong = [] if isinstance(value, dict) else [{"message": "expected a mapping"}]
    except yaml.YAMLError as error:
        wrong = [{"message": str(error)}]
    warnings = [] if found else [{"message": "empty or missing yaml metadata in repo card"}]
    at.send_json({"errors": wrong, "warnings": warnings}, 400 if wrong else 200)


def preupload(at: HubHandler, kind: str, repo: str, rev: str) -> None:
    commit = at.commit_of(at.writable(kind, repo), rev)
    answers = []
    for file in at.json()["files"]:
        held = commit.files.get(file["path"])
        mode = "lfs" if in_lfs(file["path"], file["size"]) else "regular"
        known = {"oid": held.etag} if held else {}
        answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **known})
    at.send_json({"files": answers})


def lfs_batch(at: HubHandler, kind: str, repo: str) -> None:
    at.writable(kind or "model", repo)
    objects = []
    for told in at.json()["objects"]:
        actions = {
            "upload": {"href": f"{at.hub.cdn}/lfs/{told['oid']}"},
            "verify": {"href": f"{at.hub.url}/api/lfs-verify"},
        }
        objects.append({**told, **({} if told["oid"] in at.hub.stored else {"actions": actions})})
    at.send_json({"transfer": "basic", "objects": objects})


def lfs_store(at: HubHandler, oid: str) -> None:
    held = Blob(at.body, lfs=True)
    if held.sha256 != oid:
        raise Refusal(400, "BadDigest: the content does not fit its checksum")
    at.hub.stored[oid] = held
    at.send(b"", 200, {"ETag": f'"{oid}"'})


def lfs_verify(at: HubHandler) -> None:
    told = at.json()
    held = at.hub.stored.get(told["oid"])
    if held is None or len(held.content) != told["size"]:
        raise Refusal(404, "The object was not uploaded")
    at.send_json({"message": "ok"})


def commit(at: HubHandler, kind: str, repo: str, rev: str) -> None:
    repository = at.writable(kind, repo)
    lines = [json.loads(line) for line in at.body.splitlines() if line]
    with at.hub.lock:
        before = at.commit_of(repository, rev)
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, before.oid):
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(before.files)
        for line in lines[1:]:
            OPERATIONS[line["key"]](at, files, line["value"])
        oid = repository.commit(files, header["summary"], rev)
    at.send_json({"success": True, "commitOid": oid, "commitUrl": f"{at.hub.url}/{repo}/commit/{oid}"})


def write_file(at: HubHandler, files: dict[str, Blob], told: Mapping[str, str]) -> None:
    files[told["path"]] = Blob(base64.b64decode(told["content"]), lfs=False)


def write_lfs(at: HubHandler, files: dict[str, Blob], told: Mapping[str, str]) -> None:
    if told["oid"] not in at.hub.stored:
        raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {told['path']}")
    files[told["path"]] = at.hub.stored[told["oid"]]


def delete_file(at: HubHandler, files: dict[str, Blob], told: Mapping[str, str]) -> None:
    if files.pop(told["path"], None) is None:
        raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")


OPERATIONS = {"file": write_file, "lfsFile": write_lfs, "deletedFile": delete_file}
KIND, REPO, REV = r"(?P<kind>model|dataset)s", r"(?P<repo>[^/]+(?:/[^/]+)?)", r"(?P<rev>[^/]+)"
API, OF_FILE = rf"/api/{KIND}/{REPO}", rf"/{REV}/(?P<file>.+)"
CONTENT = rf"{KIND}/{REPO}/(?P<rev>[0-9a-f]{{40}})/(?P<file>.+)"


HUB: list[Route] = [
    ("GET", rf"/api/resolve-cache/{CONTENT}", small_content),
    ("GET", rf"/(?:(?P<kind>dataset)s/)?{REPO}/resolve{OF_FILE}", resolve),
    ("GET", rf"{API}/revision/{REV}", tell),
    ("GET", rf"{API}/tree/{REV}(?:/(?P<path>.+))?", tree),
    ("GET", rf"{API}/auth-check(?P<write>/write)?", auth_check),
    ("GET", API, tell),
    ("POST", rf"{API}/paths-info/{REV}", paths_info),
    ("POST", rf"{API}/preupload/{REV}", preupload),
    ("POST", rf"{API}/commit/{REV}", commit),
    ("POST", rf"/(?:(?P<kind>dataset)s/)?{REPO}\.git/info/lfs/objects/batch", lfs_batch),
    ("POST", "/api/lfs-verify", lfs_verify),
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", validate_yaml),
]
CDN: list[Route] = [  # its addresses are signed: a token must not reach it
    ("GET", rf"/{CONTENT}", content),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", lfs_store),
]
