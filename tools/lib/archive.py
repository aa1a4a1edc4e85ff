# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""Packages of Debian suites that the machine does not use: fetched and unpacked, never installed.

The state is our own, in the cache, so the machine's package selection stays as it was.
"""

import re

import house
from house import Failure

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def mirror():
    """The Debian mirror this machine is set up to use."""
    rows = house.output_of(["apt-get", "indextargets", "--format", "$(ORIGIN) $(RELEASE) $(REPO_URI)"])
    for row in rows.splitlines():
        parts = row.split()
        if len(parts) == 3 and parts[0] == "Debian" and "security" not in parts[1]:
            return parts[2]
    raise Failure("apt knows no Debian mirror. Check /etc/apt/sources.list and run apt-get update.")


class Suite:
    """A suite of the archive, its list of packages read."""

    def __init__(self, name):
        self.name = name
        base = house.cache() / "apt" / name
        for folder in ("lists/partial", "cache/archives/partial"):
            (base / folder).mkdir(parents=True, exist_ok=True)
        (base / "source.list").write_text(f"deb [signed-by={KEYRING}] {mirror()} {name} main\n")
        settings = {
            "Dir::Etc::sourcelist": base / "source.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": base / "lists",
            "Dir::Cache": base / "cache",
            "APT::Sandbox::User": "root",
            "Acquire::Retries": "3",
        }
        self.options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
        house.step(f"reading the list of {name}", ["apt-get", *self.options, "update"],
                   house.cache() / "logs/apt.log")

    def candidate(self, package):
        """The version that the suite has of a package, or None."""
        policy = house.output_of(["apt-cache", *self.options, "policy", package])
        rows = re.findall(r"^ (?:\*\*\*|   ) (\d\S*) \d+\n((?: {8,}.*\n)+)", policy, re.M)
        return next((version for version, origins in rows if f" {self.name}/" in origins), None)

    def search(self, pattern):
        """The packages whose names match, as apt-cache prints them."""
        return house.output_of(["apt-cache", *self.options, "search", "--names-only", pattern])

    def unpack(self, packages, folder, title):
        """Fetches packages, a dictionary of names and versions, and unpacks them into a new folder."""
        logs = house.cache() / "logs"
        files = folder.with_name(folder.name + ".packages")
        files.mkdir(parents=True)
        wanted = [f"{name}={version}" for name, version in packages.items()]
        house.step(f"fetching {title}", ["apt-get", *self.options, "download", *wanted], logs / "fetch.log", cwd=files)
        for package in sorted(files.glob("*.deb")):
            house.step(f"unpacking {package.name.partition('_')[0]}", ["dpkg-deb", "-x", package, folder],
                       logs / "unpack.log")
