"""`shoal agent install`: a systemd unit that runs the agent from boot on, with what it was given.

As root it is a unit of the system, run as the user who called sudo; otherwise one of the user's
own. The join line goes into a file that only that user reads, since units are readable to all.

A join line is good for one key. So an agent that was started by hand before goes on with the key
and the fragments that it has: a unit of the user's own has the same folder, one of the system is
given that of its user where it has none of its own yet.
"""

import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_agent.settings import Settings, parse
from shoal_protocol.interpreter import module_command
from shoal_protocol.state_folders import state_folder

NAME: Final = "shoal-agent"
_SYSTEM_UNITS: Final = Path("/etc/systemd/system")
_SYSTEM_STATE: Final = Path("/var/lib") / NAME
_STOP_SECONDS: Final = 10
"""Beyond the time that draining may take."""
_PATHS: Final = ("--cache", "--identity-folder", "--budget-file", "--speed")
"""What options name of this machine's files, beside the join line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a unit and what its agent keeps go. `user` is whom the system runs it as; "": it is the
    user's own unit. `by_hand` is what an agent that this user started by hand has kept."""

    units: Path
    state: Path
    user: str = ""
    by_hand: Path | None = None

    @property
    def kept(self) -> Path:
        """The folder of key, certificate and fragments."""
        if self.by_hand is None or (self.state / "identity").exists():
            return self.state
        return self.by_hand if (self.by_hand / "identity").exists() else self.state


def install(arguments: Sequence[str], place: Place | None = None) -> int:
    """Write the unit for `JOIN [OPTION...]`; the exit status."""
    settings = parse(arguments)
    if settings.enrolment is None or settings.enrolment.join is None:
        print("shoal agent install: needs a join line: install JOIN [OPTION...]", file=sys.stderr)
        return 2
    place = place or place_for(settings.name)
    join = str(settings.enrolment.join)
    options = [each for each in _absolute(arguments) if not _is_join(each, join)]
    try:
        _write(place, f"{join}\n", unit(settings, options, place))
    except OSError as error:
        print(f"shoal agent install: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    control = "sudo systemctl" if place.user else "systemctl --user"
    print(f"wrote {place.units / f'{NAME}.service'}; start it now, and at each boot, with:")
    print(f"  {control} daemon-reload && {control} enable --now {NAME}")
    if not place.user:
        print("  loginctl enable-linger    (else it runs only while you are logged in)")
    return 0


def unit(settings: Settings, options: Sequence[str], place: Place) -> str:
    """The unit's text: the agent with its options, and its folders where it finds them again."""
    command = [*module_command("shoal_agent", "-OO"), str(place.state / "join")]
    command += ["--identity-folder", str(place.kept / "identity")]
    command += ["--cache", str(place.kept / "cache"), *options, "--name", settings.name]
    stop_seconds = round(settings.drain_seconds) + _STOP_SECONDS
    lines = [
        "[Unit]",
        f"Description=Shoal agent {settings.name}",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=exec",
        *([f"User={place.user}"] if place.user else []),
        f"ExecStart={' '.join(map(_quoted, command))}",
        "Restart=always",
        "RestartSec=5",
        "# The options are wrong: to try again changes nothing.",
        "RestartPreventExitStatus=2",
        f"TimeoutStopSec={stop_seconds}",
        "# Where memory runs out, the kernel ends what prepares a fragment. The agent is to go on.",
        "OOMPolicy=continue",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        f"WantedBy={'multi-user' if place.user else 'default'}.target",
    ]
    return "\n".join(lines) + "\n"


def place_for(name: str) -> Place:
    """Where the unit of a device of this name goes."""
    if os.geteuid() == 0:
        user = os.environ.get("SUDO_USER")
        kept = Path(pwd.getpwnam(user).pw_dir) / ".local/state/shoal" if user else state_folder()
        by_hand = kept / "agent" / name
        return Place(units=_SYSTEM_UNITS, state=_SYSTEM_STATE, user=user or "root", by_hand=by_hand)
    chosen = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Place(units=Path(chosen) / "systemd/user", state=state_folder() / "agent" / name)


def _absolute(arguments: Sequence[str]) -> list[str]:
    """The same from another folder: systemd starts what it runs in one of its own."""
    made = list[str]()
    for each in arguments:
        option, sign, value = each.partition("=")
        if made and made[-1] in _PATHS:
            made.append(os.path.abspath(each))
        elif sign and option in _PATHS:
            made.append(f"{option}={os.path.abspath(value)}")
        else:
            made.append(each)
    return made


def _is_join(argument: str, join: str) -> bool:
    """Whether an argument is the join line, or the file that holds it."""
    if argument.startswith("shoal://"):
        return True
    try:
        return Path(argument).read_text().strip() == join
    except (OSError, ValueError):
        return False


def _write(place: Place, join: str, text: str) -> None:
    owner = pwd.getpwnam(place.user) if place.user else None
    place.units.mkdir(parents=True, exist_ok=True)
    place.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = place.state / "join"
    # The folder may be another user's, and the name a link of theirs to any file: a new one.
    secret.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(secret, flags, 0o600), "w") as file:
        file.write(join)
        if owner is not None:
            os.fchown(file.fileno(), owner.pw_uid, owner.pw_gid)
    if owner is not None:
        os.chown(place.state, owner.pw_uid, owner.pw_gid)
    (place.units / f"{NAME}.service").write_text(text)


def _quoted(word: str) -> str:
    """A word of a command as systemd reads it: nothing in it is replaced."""
    word = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{word}"' if not word or any(letter in word for letter in " \t;'\"\\") else word
