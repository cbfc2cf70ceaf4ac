"""Put a built site into the branch of Pages, one folder for each version: python tools/site/publish.py.

VERSION is `dev` or a tag `v1.2.3`; PUSH_TO is the address of the repository, with what is needed to write to it. The
newest release is also at `latest`, where the root leads; without a release, to `dev`. The version selector of the theme
reads `versions.json`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

BRANCH = "gh-pages"
ROOT_PAGE = '<!doctype html><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">{0}</a>\n'


def place(site: Path, pages: Path, version: str) -> None:
    """Copy a site to the folder of its version and write the list of versions."""
    version = version.removeprefix("v")
    for folder in [version] if version == "dev" else [version, "latest"]:
        shutil.rmtree(pages / folder, ignore_errors=True)
        shutil.copytree(site, pages / folder)
    folders = {path.parent.name for path in pages.glob("*/index.html")}
    releases = sorted(folders - {"dev", "latest"}, key=_parts, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in releases]
    if releases:
        listed[0]["aliases"] = ["latest"]
    if "dev" in folders:
        listed.append({"version": "dev", "title": "dev", "aliases": []})
    (pages / "versions.json").write_text(json.dumps(listed, indent=1) + "\n")
    (pages / "index.html").write_text(ROOT_PAGE.format("latest" if releases else "dev"))
    (pages / ".nojekyll").touch()


def _parts(version: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in version.split(".")]


def main() -> None:
    """Take the branch as it is, or begin it; place `site/`; push."""
    version, address = os.environ["VERSION"], os.environ["PUSH_TO"]
    with tempfile.TemporaryDirectory() as folder:
        cloned = subprocess.run(["git", "clone", "-q", "--depth=1", "-b", BRANCH, address, folder], check=False)
        if cloned.returncode:
            subprocess.run(["git", "init", "-q", "-b", BRANCH, folder], check=True)
        place(Path("site"), Path(folder), version)
        who = ["-c", "user.name=docs", "-c", "user.email=docs@localhost"]
        for command in (
            ["add", "-A"],
            [*who, "commit", "-q", "-m", f"Site of {version}"],
            ["push", "-q", address, BRANCH],
        ):
            subprocess.run(["git", "-C", folder, *command], check=True)


if __name__ == "__main__":
    main()
