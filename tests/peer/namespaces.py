"""A relay and members, each in a network namespace whose only link leads to the relay.

`unshare -rn python -m tests.peer.namespaces FOLDER COUNT` runs them to their end.
"""

import subprocess
import sys
import time
from pathlib import Path


def ip(*words: str, pid: int | None = None) -> None:
    enter = [] if pid is None else ["nsenter", "-t", str(pid), "-n"]
    subprocess.run([*enter, "ip", *words], check=True)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fedcb2o", "peer", *map(str, words)]


def main(folder: Path, count: int) -> int:
    federation = folder / "federation.toml"
    keys = folder / "relay-keys"
    ip("link", "set", "lo", "up")
    ip("addr", "add", "10.77.0.1/32", "dev", "lo")
    relay = subprocess.Popen(
        command("relay", federation, "--identity", keys), stderr=(folder / "relay.log").open("w")
    )
    members = []
    for j in range(count):
        run = command("run", federation, "--identity", folder / f"org-{j}", "--out")
        run += [str(folder / f"out-{j}"), "--simulate", str(folder / "settings.toml")]
        run += ["--relay", str(keys / "relay.member.toml")]
        waiting = ["unshare", "-n", "sh", "-c", 'read _; exec "$@"', "member", *run]
        log = (folder / f"out-{j}.log").open("w")
        member = subprocess.Popen(waiting, stdin=subprocess.PIPE, stderr=log, stdout=log)
        time.sleep(0.5)  # until it has its namespace
        pid = member.pid
        ip("link", "add", f"v{j}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        ip("addr", "add", f"10.77.{j + 1}.1/30", "dev", f"v{j}")
        ip("link", "set", f"v{j}", "up")
        ip("addr", "add", f"10.77.{j + 1}.2/30", "dev", "eth0", pid=pid)
        ip("link", "set", "eth0", "up", pid=pid)
        ip("route", "add", "10.77.0.1/32", "via", f"10.77.{j + 1}.1", pid=pid)
        members.append(member)
    for member in members:
        go(member)
    statuses = [member.wait() for member in members]
    relay.kill()
    return max(statuses)


def go(member: "subprocess.Popen[bytes]") -> None:
    assert member.stdin is not None
    member.stdin.write(b"\n")
    member.stdin.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
