"""Where to cut a model."""

from dataclasses import dataclass

from shoal_operator.api.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRequest:
    """What is asked for: a number of fragments, or a limit of resident bytes for each fragment (then as
    few fragments as possible), or the named tensors that are to cross a border. `fragments` together
    with `max_bytes` asks for that many, none over the limit. Nothing given: one fragment.
    """

    fragments: int | None = None
    max_bytes: int | None = None
    tensors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why there is no such cut. `need_bytes` and `have_bytes` are set where a limit is too small."""

    reason: str
    node: str | None = None
    need_bytes: int | None = None
    have_bytes: int | None = None


def choose_cuts(profile: Profile, request: CutRequest) -> tuple[int, ...] | Refusal:
    """The positions of `profile.nodes` to cut at, in order; () leaves the model whole."""
    raise NotImplementedError
