"""Kubeconfigs, read without a cluster."""

import json
from pathlib import Path

import pytest

from kubeconfigs import kubeconfig
from shoal_operator.controller.login import LoginRefused, log_in


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such file"),
        ("", "is empty"),
        ("a: [", "expected"),
        ("[]", "list"),
        ("{}", "current-context"),
        ("current-context: c\ncontexts: []", "Expected object with name c"),
    ],
)
async def test_a_kubeconfig_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "broken"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LoginRefused) as refused:
        await log_in(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert said in str(refused.value)


async def test_an_exec_plugin_that_fails_is_refused_and_its_words_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "plugin"
    script.write_text("#!/bin/sh\necho you have to log in first >&2\nexit 3\n")
    script.chmod(0o700)
    user = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script)}
    path = kubeconfig(tmp_path, server="https://127.0.0.1:1", exec=user)
    with pytest.raises(LoginRefused, match="no token and no certificate"):
        await log_in(path)
    assert "you have to log in first" in caplog.text


async def test_a_kubeconfig_without_any_credential_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoginRefused, match="no token and no certificate"):
        await log_in(kubeconfig(tmp_path, server="https://127.0.0.1:1"))


async def test_several_kubeconfigs_are_merged_as_kubectl_does(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "b" / "token").write_text("relative to its own file")
    whole = kubeconfig(tmp_path, server="http://127.0.0.1:1", tokenFile="token")
    document = json.loads(whole.read_text())
    users = {"users": document.pop("users")}
    parts = (tmp_path / "a" / "config", tmp_path / "b" / "config")
    for part, content in zip(parts, (document, users), strict=True):
        part.write_text(json.dumps(content))
    login = await log_in(Path(":".join(map(str, parts))))
    sent = await login.configuration.get_api_key_with_prefix("BearerToken")
    assert sent == "Bearer relative to its own file"
