"""Runs a tiny analysis into a disk that fills, at every size from nothing to enough.

    unshare --map-root-user --mount python full_disk.py FOLDER [STRIDE]

Tries every STRIDE-th number of free blocks. Mounts a small disk there, which needs the rights that `unshare` gives. A run ends by one
sentence and status 1, leaves no half-written file, and the same run ends with the same
numbers once there is room. What ends otherwise raises.
"""

import contextlib
import pathlib
import re
import subprocess
import sys

import bad_folders
import damage

BLOCK = 4096
# Measurements, and what is there when the last of their files do not fit: amid the state
# of eigenpairs, and beside the results of a trace, which needs less room before.
WHERE = {"eigenpairs": "hessian_eigenpairs.state", "hutchinson": "config.gin"}


def mount(folder, *options):
    """Mounts a disk of two MiB in memory, or changes how it is mounted."""
    kind = ["-t", "tmpfs", "-o", ",".join(["size=2m", *options]), "tmpfs"]
    subprocess.run(["mount", *kind, str(folder)], check=True)


def refused(path, name, reason):
    """Whether a run stopped, by one sentence."""
    status, said, _ = bad_folders.command(path, name)
    if status == 0:
        return False
    assert status == 1, said
    assert re.fullmatch(r"analyze: [^\n]{10,600}\n", said), said
    assert reason in said, said
    assert "start the same command again to resume" in said, said
    parts = [x for x in path.rglob("*") if ".part" in x.name]
    assert not parts, parts
    return True


def stops(disk, name, stride):
    """The names of files that were there each time a run stopped."""
    path, filler = disk / "results", disk / "filler"
    status, said, _ = bad_folders.command(path, name)
    assert (status, said) == (0, ""), said
    table = bad_folders.numbers(bad_folders.command(path, name)[2])
    for blocks in range(0, 500, stride):
        damage.remove(path)
        fill(filler, blocks)
        if not refused(path, name, "No space left on device"):
            break
        yield {x.name for x in path.rglob("*")}
        filler.unlink()
        status, said, shown = bad_folders.command(path, name)
        assert (status, said) == (0, ""), said
        assert bad_folders.numbers(shown) == table
    filler.unlink(missing_ok=True)
    damage.remove(path)


def main(folder, stride="1"):
    """Fills the disk, makes room, and makes it read-only."""
    disk = pathlib.Path(folder)
    mount(disk)
    for name, last in WHERE.items():
        found = list(stops(disk, name, int(stride)))
        assert "run.json" not in found[0], found[0]
        assert any(last in names for names in found), found
        sys.stdout.write(f"{name} stopped {len(found)} times\n")
    mount(disk, "remount", "ro")
    assert refused(disk / "results", name, "Read-only file system")


def fill(filler, blocks):
    """Leaves so many free blocks."""
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(BLOCK)) == BLOCK:
                pass
        file.truncate(max(0, file.tell() - blocks * BLOCK))


if __name__ == "__main__":
    main(*sys.argv[1:])
