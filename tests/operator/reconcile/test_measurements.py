"""What devices measure, and what is predicted with it, is written once a minute."""

from dataclasses import replace

from reconcile.test_device_pool import see as see_pool
from reconcile.test_device_pool import shown, view
from reconcile.test_placement import KEPT, LATER, SOON, device, devices, placement, see
from reconcile.values import NOW, condition
from shoal_api.kinds import Device
from shoal_operator.reconcile.snapshot import CoordinatorView
from shoal_protocol.speeds import FragmentTime, Link, Speed


def measured_at(of: float) -> CoordinatorView:
    """Three devices that compute at these rates."""
    speed = Speed(convolution_flops_per_second=of, product_flops_per_second=of)
    view = devices("a", "b", "c")
    return replace(view, devices=tuple(replace(each, speed=speed) for each in view.devices))


def test_what_is_predicted_of_the_plan_in_force_is_written_once_a_minute() -> None:
    """Devices that work measure something else with each poll, and etcd may be on an SD card."""
    of, _, first = see(placement(), measured_at(8e9))
    for rate in (7e9, 5e9, 6e9):
        of, decision, status = see(of, measured_at(rate), now=SOON)
        assert status == first
        assert decision.requeue_seconds == 50
    of, decision, later = see(of, measured_at(6e9), now=LATER)
    assert later.predicted is not None
    assert first.predicted is not None
    assert later.predicted != first.predicted
    assert (later.predicted_time, later.epoch) == (LATER, first.epoch)
    assert condition(later, "Planned").message != condition(first, "Planned").message
    _, decision, last = see(of, measured_at(6e9), now="2026-03-01T13:00:00Z")
    assert last == later
    assert decision.requeue_seconds is None


def test_what_becomes_known_and_what_was_asked_for_anew_is_written_at_once() -> None:
    of, _, first = see(placement(), measured_at(8e9))
    view = measured_at(7e9)
    its = FragmentTime(digest=KEPT.document.fragments[0].digest, within=((0, 0.5),))
    ran = tuple(replace(each, times=(its,)) for each in view.devices)
    _, _, status = see(of, replace(view, devices=ran), now=SOON)
    assert (status.predicted_time, status.epoch) == (SOON, first.epoch)
    assert [time.measured for time in status.budgets[0].times].count(True) == 1
    edited = replace(of, metadata=replace(of.metadata, generation=2))
    _, _, status = see(edited, measured_at(7e9), now=SOON)
    assert (status.predicted_time, status.epoch) == (SOON, first.epoch)


def test_what_a_device_measures_is_written_once_a_minute_and_at_once_when_it_is_new() -> None:
    """A device that works measures something else every few seconds."""

    def measured(of: tuple[Device, ...], rate: float, now: str, **peers: float) -> Device:
        its = tuple((name, Link(bytes_per_second=each)) for name, each in peers.items())
        link = Link(bytes_per_second=rate, peers=its)
        return shown(see_pool(devices=of, view=view(replace(device("n1"), link=link)), now=now))[0]

    def rates(of: Device) -> list[float | None]:
        assert of.status is not None
        assert of.status.link is not None
        own = of.status.link
        return [own.bytes_per_second, *(each.bytes_per_second for each in own.peers)]

    of = measured((), 1e8, NOW)
    again = measured((of,), 2e8, SOON)
    assert again.status == of.status
    met = measured((of,), 3e8, SOON, n2=1e7)
    assert rates(met) == [3e8, 1e7]
    after = measured((met,), 4e8, LATER, n2=2e7)
    assert rates(after) == [4e8, 2e7]
    assert after.status is not None
    assert after.status.last_seen_time == LATER
