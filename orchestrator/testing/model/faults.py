"""Planted faults: what a careless hand might write where no table decides. The model must find every one of them."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.testing.model import faults_of_decode as of_decode
from orchestrator.testing.model import faults_of_prefill as of_prefill
from orchestrator.testing.model.bounds import Bounds
from orchestrator.testing.model.decode import Decode
from orchestrator.testing.model.prefill import Prefill
from orchestrator.testing.model.system import System
from protocols.leases import LeaseBook


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, and the part that has it."""

    name: str
    part: type[LeaseBook] | type[Decode] | type[Prefill] | type[System]
    and_prefill: type[Prefill] = Prefill
    """Where it takes two: the other side would turn it away."""

    def system(self, bounds: Bounds) -> System:
        if issubclass(self.part, System):
            return self.part(bounds)
        if issubclass(self.part, Prefill):
            return System(bounds, prefill_type=self.part)
        if issubclass(self.part, Decode):
            return System(bounds, self.part, self.and_prefill)
        return System(bounds, type("Mutant", (Decode,), {"book_type": self.part}))


PLANTED = [
    Planted("a unit is freed when a deadline passes", of_decode.FreedOnTimeout),
    Planted("a unit is freed on the first of two acknowledgements", of_decode.FreedOnFirstAck),
    Planted("what a writer cannot tell yet is taken as quiet", of_decode.UnknownIsQuiet),
    Planted("what one writer cannot tell is freed by another's quiet", of_decode.QuietOfOneUnit),
    Planted("an acknowledgement's doubt is not heard", of_decode.DoubtUnheard),
    Planted("quiet frees what is in doubt", of_decode.QuietThoughInDoubt),
    Planted("a writer's death is taken as a fence", of_decode.DeathIsAFence),
    Planted("a writer that is gone is waited for", of_decode.DeathIsSilence),
    Planted("a fence frees what other sessions hold", of_decode.FenceAcrossSessions),
    Planted("a fence frees what is live", of_decode.FenceOfTheLiving),
    Planted("one writer's Done counts for all", of_decode.DoneOfOneIsDoneOfAll),
    Planted("a decode commits with the first Done", of_decode.CommitsWithTheFirstDone),
    Planted("a decode tells one rank of an abort", of_decode.TellsOneRankOfAnAbort),
    Planted("a failed room is offered", of_decode.OffersAfterItFailed),
    Planted("an offered room moves to the new engine", of_decode.MovesAnOfferedRoom),
    Planted("units are fenced before the engine has ended", of_decode.FencesBeforeTheEnd),
    Planted("live rooms are left in the old engine", of_decode.LeavesRoomsInTheOldEngine),
    Planted("a room that a thread has aborted is left in the old engine", of_decode.ForgetsAbortedRooms),
    Planted("a rollover between Hello and Welcome is not told", of_decode.WelcomedUnderAnOldName),
    Planted("only the first Hello's session is compared", of_decode.ComparesTheFirstHello),
    Planted("a link that is given up counts as gone", of_decode.TrustsThoseItGaveUp),
    Planted("ports are released without a word of the writers", of_decode.AwaitsNobody),
    Planted("Done before everything landed", of_prefill.DoneBeforeItLanded),
    Planted("a prefill succeeds with its own Done", of_prefill.SucceedsWithDone),
    Planted("a prefill succeeds with the first Committed", of_prefill.SucceedsWithTheFirstCommitted),
    Planted("source pages are free when a room is cancelled", of_prefill.SourceFreeOnCancel),
    Planted("a running write is called quiet", of_prefill.QuietWhileItRuns),
    Planted("a failed write is called quiet", of_prefill.QuietThoughItFailed),
    Planted(
        "an Offer of an engine that is deleted is honoured", of_decode.OffersTheOldEngine, of_prefill.HonoursALateOffer
    ),
    Planted("a rollover is acknowledged while tasks run", of_prefill.AcknowledgesARolloverAtOnce),
    Planted("rooms of an earlier incarnation go on", of_prefill.KeepsRoomsOfTheGone),
    Planted("the acknowledgement overtakes the reason", of_prefill.DrainedBeforeItIsToldWhy),
    Planted("generations do not supersede one another", of_prefill.TakesEveryGeneration),
    Planted("a restarted prefill answers for the one before", of_prefill.RestartsUnnoticed),
]
