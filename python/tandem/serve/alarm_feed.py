"""What the acceptance alarm is told of requests, and where it shows; runs on the engine's thread."""

from __future__ import annotations

import msgspec

from tandem.engine.errors import InvalidParameterError
from tandem.engine.outputs import RequestOutput
from tandem.serve.alarm import AcceptanceAlarm, Baseline, round_sd
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT, Snapshot

MIN_ROUNDS = 8
"""Shorter requests are left out: their last round, cut where the request ends, would weigh too much."""


def expected_acceptance(rate: float, prompt_sd: float, draft_len: int) -> Baseline:
    """The baseline of a given acceptance rate and its deviation between prompts.

    Raises:
        InvalidParameterError: there are no drafts, or a value is outside of its range.
    """
    if draft_len == 0:
        raise InvalidParameterError("acceptance_baseline", rate, "none where no drafts are proposed")
    try:
        return Baseline(rate, prompt_sd, round_sd(rate, draft_len))
    except ValueError as error:
        raise InvalidParameterError("acceptance_baseline", (rate, prompt_sd), str(error)) from error


def report_request(watch: AcceptanceAlarm, output: RequestOutput, draft_len: int) -> bool:
    """Tell the alarm of a request that has ended; whether it was fit to be told.

    Left out are requests that failed, that lost their seat (their route changed on the way), and those that did not
    draft ``draft_len`` tokens in every round, since fewer drafts are accepted at a higher rate.
    """
    rounds = output.rounds
    fit = output.finish_reason != "error" and output.num_preemptions == 0 and rounds.num_rounds >= MIN_ROUNDS
    if not fit or rounds.num_drafted != rounds.num_rounds * draft_len:
        return False
    route = PREFIX_HIT if output.cached_tokens else COLD
    watch.report(route, output.request_id, rounds.num_rounds, rounds.num_drafted, rounds.num_accepted)
    watch.end(output.request_id)
    return True


def with_alarms(snapshot: Snapshot, watch: AcceptanceAlarm) -> Snapshot:
    """The snapshot with the state of the alarms."""
    return msgspec.structs.replace(snapshot, alarms=watch.states())
