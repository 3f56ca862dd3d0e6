"""What a join line stands for on the agent's command line, and the unit that runs it from boot."""

import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal_agent.cache.owning import owned
from shoal_agent.installation import Place, install, place_for
from shoal_agent.settings import Settings, parse
from shoal_agent.telemetry.machine import Machine
from shoal_agent.transport.addresses import reached_at

LINE = f"shoal://10.0.0.1:7400/{'ab' * 32}/k2ju0diBV3TGMr20HyPPD94ALVXYFvxA"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)


def check_joined(settings: Settings) -> None:
    enrolment = settings.enrolment
    assert enrolment is not None
    assert str(enrolment.join) == LINE
    assert enrolment.target == "10.0.0.1:7401"
    assert settings.credentials == enrolment.credentials
    assert (settings.coordinator, settings.coordinator_name) == (
        "10.0.0.1:7400",
        "shoal-coordinator",
    )


def test_a_join_line_says_all_that_an_agent_needs() -> None:
    settings = parse([LINE, "--name", "pi-4"])
    check_joined(settings)
    assert settings.listen == "0.0.0.0:0"
    assert settings.budget == Machine().memory_bytes // 2
    assert settings.log_level == "info"  # else who started it by hand sees nothing
    assert settings.cache == Path("/users/me/.local/state/shoal/agent/pi-4/cache")
    assert settings.enrolment is not None
    assert settings.enrolment.folder == Path("/users/me/.local/state/shoal/agent/pi-4/identity")


def test_logs_are_as_wished_with_a_join_line_too_and_scarce_without() -> None:
    assert parse([LINE, "--log-level", "error"]).log_level == "error"
    alone = parse(["--coordinator", "unix:/c", "--budget", "64Mi"])
    assert alone.log_level == "warning"


def test_a_join_line_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "join").write_text(f"{LINE}\n")
    check_joined(parse([str(tmp_path / "join"), "--budget", "64Mi"]))


def test_a_device_that_joins_may_have_its_budget_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "budget"
    file.write_text("48Mi")
    assert parse([LINE, "--budget-file", str(file)]).budget == 48 << 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([LINE, "--coordinator", "unix:/c"], "a join line excludes --coordinator"),
        ([LINE, "--insecure"], "a join line excludes --coordinator"),
        (["shoal://10.0.0.1:7400"], "this is no join line"),
        (["/no/such/file"], "/no/such/file: No such file or directory; a join line begins"),
    ],
)
def test_a_join_line_that_cannot_be_used_gives_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        parse(arguments)
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert LINE.rpartition("/")[2] not in line


def test_an_agent_that_listens_everywhere_is_reached_at_its_address_towards_the_coordinator() -> (
    None
):
    assert reached_at("0.0.0.0:0", "127.0.0.1:7400") == "127.0.0.1:0"
    assert reached_at("0.0.0.0:7401", "localhost:7400") == "127.0.0.1:7401"
    assert reached_at("10.0.0.7:7401", "127.0.0.1:7400") == "10.0.0.7:7401"
    assert reached_at("unix:/agent", "unix:/coordinator") == "unix:/agent"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(units=tmp_path / "units", state=tmp_path / "state")


def test_install_writes_a_unit_that_systemd_takes(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--name", "pi-4", "--budget", "512Mi", "--cache-size", "2Gi"]
    assert install([LINE, *options], place) == 0
    file = place.units / "shoal-agent.service"
    text = file.read_text()
    (command,) = [each for each in text.splitlines() if each.startswith("ExecStart=")]
    assert f" -OO -P -m shoal_agent {place.state}/join " in command
    assert "--budget 512Mi --cache-size 2Gi" in command
    assert "enable --now shoal-agent" in capsys.readouterr().out
    if (analyze := shutil.which("systemd-analyze")) is not None:
        verify = [analyze, "verify", "--user", str(file)]
        checked = subprocess.run(verify, check=False, capture_output=True, text=True)
        assert "shoal-agent" not in checked.stderr, checked.stderr


def test_an_agent_whose_child_the_kernel_has_ended_is_not_stopped(place: Place) -> None:
    """As systemd does by default: it would be started again, prepare the same, and be stopped."""
    assert install([LINE, "--name", "pi-4", "--budget", "64Mi"], place) == 0
    lines = (place.units / "shoal-agent.service").read_text().splitlines()
    assert "OOMPolicy=continue" in lines[lines.index("[Service]") : lines.index("[Install]")]


def test_the_installed_command_is_one_that_the_agent_takes(place: Place, tmp_path: Path) -> None:
    (tmp_path / "given").write_text(LINE)
    assert install([str(tmp_path / "given"), "--budget", "64Mi", "--name", "pi-4"], place) == 0
    text = (place.units / "shoal-agent.service").read_text()
    command = text.partition("ExecStart=")[2].splitlines()[0].split()
    settings = parse(command[command.index("shoal_agent") + 1 :])
    check_joined(settings)
    assert settings.cache == place.state / "cache"
    assert settings.name == "pi-4"


def test_the_token_is_in_no_file_that_others_read(place: Place) -> None:
    assert install([LINE], place) == 0
    token = LINE.rpartition("/")[2]
    assert token not in (place.units / "shoal-agent.service").read_text()
    secret = place.state / "join"
    assert secret.read_text().strip() == LINE
    assert secret.stat().st_mode & 0o077 == 0


def installed(place: Place) -> Settings:
    """What the agent of the unit is started with."""
    text = (place.units / "shoal-agent.service").read_text()
    command = text.partition("ExecStart=")[2].splitlines()[0].split()
    return parse(command[command.index("shoal_agent") + 1 :])


def folder_of(settings: Settings) -> Path:
    assert settings.enrolment is not None
    assert settings.enrolment.folder.parent == settings.cache.parent
    return settings.cache.parent


def test_a_unit_of_the_users_own_goes_on_as_the_agent_that_was_started_by_hand(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The line was used with its key, and is good for no other."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    by_hand = folder_of(parse([LINE, "--name", "pi-4"]))
    assert install([LINE, "--name", "pi-4"]) == 0
    place = Place(units=tmp_path / ".config/systemd/user", state=by_hand)
    assert folder_of(installed(place)) == by_hand
    assert (by_hand / "join").read_text().strip() == LINE


def test_a_unit_of_the_system_goes_on_as_the_agent_that_its_user_started_by_hand(
    place: Place, tmp_path: Path
) -> None:
    place = replace(place, by_hand=tmp_path / "by-hand")
    assert install([LINE, "--name", "pi-4"], place) == 0
    assert folder_of(installed(place)) == place.state
    (tmp_path / "by-hand/identity").mkdir(parents=True)
    assert install([LINE, "--name", "pi-4"], place) == 0
    assert folder_of(installed(place)) == tmp_path / "by-hand"
    (place.state / "identity").mkdir()
    assert install([LINE, "--name", "pi-4"], place) == 0
    assert folder_of(installed(place)) == place.state


def test_the_folder_by_hand_is_that_of_the_user_who_called_sudo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_USER", "nobody")
    home = pwd.getpwnam("nobody").pw_dir
    assert place_for("pi-4").by_hand == Path(home, ".local/state/shoal/agent/pi-4")
    monkeypatch.delenv("SUDO_USER")
    assert place_for("pi-4").by_hand == Path("/users/me/.local/state/shoal/agent/pi-4")


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_as_root_the_unit_runs_as_the_user_who_called_sudo(place: Place) -> None:
    mine = Place(units=place.units, state=place.state, user="nobody")
    assert install([LINE], mine) == 0
    text = (place.units / "shoal-agent.service").read_text()
    assert "\nUser=nobody\n" in text
    assert "WantedBy=multi-user.target" in text
    assert (place.state / "join").owner() == place.state.owner() == "nobody"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_installing_again_as_root_writes_to_no_file_that_the_agents_user_has_chosen(
    place: Place, tmp_path: Path
) -> None:
    """The folder is that user's by then: a model that broke into the agent may write to it."""
    mine = Place(units=place.units, state=place.state, user="nobody")
    assert install([LINE], mine) == 0
    passwords = tmp_path / "shadow"
    passwords.write_text("root's")
    (place.state / "join").unlink()
    (place.state / "join").symlink_to(passwords)
    assert install([LINE], mine) == 0
    assert (passwords.read_text(), passwords.owner()) == ("root's", "root")
    secret = place.state / "join"
    assert not secret.is_symlink()
    assert (secret.read_text().strip(), secret.owner()) == (LINE, "nobody")


def test_install_without_a_join_line_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(["--coordinator", "unix:/c", "--budget", "64Mi"], place) == 2
    assert "needs a join line" in capsys.readouterr().err
    assert not place.units.exists()


def test_options_reach_the_agent_as_they_are(place: Place) -> None:
    odd = "/a b/100%/$HOME"
    assert install([LINE, "--cache", odd], place) == 0
    text = (place.units / "shoal-agent.service").read_text()
    assert '"/a b/100%%/$$HOME"' in text


def test_paths_are_those_of_the_folder_in_which_it_is_installed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "budget").write_text("64Mi")
    options = ["--cache", "disk/cache", "--identity-folder=own", "--budget-file", "budget"]
    assert install([LINE, *options], place) == 0
    monkeypatch.chdir("/")
    text = (place.units / "shoal-agent.service").read_text()
    command = text.partition("ExecStart=")[2].splitlines()[0].split()
    settings = parse(command[command.index("shoal_agent") + 1 :])
    assert settings.cache == tmp_path / "disk/cache"
    assert settings.budget_file == tmp_path / "budget"
    assert settings.enrolment is not None
    assert settings.enrolment.folder == tmp_path / "own"


@pytest.mark.parametrize("joins", [True, False])
def test_an_agent_that_runs_already_is_not_started_beside_itself(
    tmp_path: Path, joins: bool
) -> None:
    """By hand while systemd runs it, for one: each would take the other's session, for ever. And
    where two have the default cache, activations of one would be computed with by the other."""
    cache = tmp_path / "cache"
    options = [LINE, f"--identity-folder={tmp_path / 'identity'}"]
    if not joins:
        options = ["--coordinator", f"unix:{tmp_path}/c.sock", "--budget", "8Mi"]
    with owned(cache):
        second = subprocess.run(
            [sys.executable, "-m", "shoal_agent", f"--cache={cache}", *options],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert second.returncode == 1, "systemd tries again"
    assert second.stderr.startswith(f"shoal agent: {cache} is used by another agent, of this name")
    with owned(cache):
        pass
