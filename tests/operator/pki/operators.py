"""An operator's side of enrolment: the real service over TLS, with tokens that a test hands out."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from certificates import HOSTS
from shoal_agent.enrolment.identity import Enrolment
from shoal_operator.pki.pods import PodTokens, Reviewed
from shoal_protocol.pki.authority import DEVICE_LIFETIME, Authority, Issued, Use
from shoal_protocol.pki.enrolment import EnrolmentService, ReviewFailed, listen_for_enrolment


@dataclass
class Operator:
    """`tokens` are those that the API server would accept; `pools` the authorities by namespace."""

    folder: Path
    tokens: dict[str, Reviewed] = field(default_factory=dict)
    pools: dict[str, Authority] = field(default_factory=dict)
    away: bool = False
    lifetime: timedelta = DEVICE_LIFETIME
    own: Authority = field(default_factory=lambda: Authority.make("shoal", datetime.now(UTC)))
    clock_offset: timedelta = timedelta()
    target: str = ""

    async def identify(self, token: str) -> Reviewed | None:
        if self.away:
            raise ReviewFailed("the API server is away")
        return self.tokens.get(token)

    async def find(self, reviewed: Reviewed) -> Authority | None:
        if not reviewed.service_account.endswith("-agent"):
            return None
        return self.pools.get(reviewed.namespace)

    def clock(self) -> datetime:
        return datetime.now(UTC) + self.clock_offset

    def grant(self, token: str, node: str, *, account: str = "shelf-agent") -> None:
        self.tokens[token] = Reviewed(
            namespace="default", pod=f"agent-on-{node}", node=node, service_account=account
        )

    def device(self, name: str, token: str) -> Enrolment:
        """What a device is told; its token is in a file, as in a pod."""
        (self.folder / f"{name}.token").write_text(token + "\n")
        (self.folder / "enrol-ca.pem").write_bytes(self.own.certificate)
        return Enrolment(
            target=self.target,
            ca=self.folder / "enrol-ca.pem",
            token=self.folder / f"{name}.token",
            name=name,
            folder=self.folder / f"identity-{name}",
        )

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[None]:
        service = EnrolmentService(
            PodTokens(self.identify, self.find, self.clock).review, self.clock, self.lifetime
        )
        issued = self.own.issue("shoal-operator", datetime.now(UTC), hosts=HOSTS, use=Use.BOTH)

        async def identity() -> Issued:
            return issued

        listener, bound = await listen_for_enrolment(service, f"localhost:{port}", identity)
        self.target = f"localhost:{bound}"
        try:
            yield
        finally:
            await listener.stop(None)
