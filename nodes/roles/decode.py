"""The decode role: reserve blocks first, take the KV that arrives, generate, move running requests elsewhere.

Also computes prompts itself when asked to (Reserve.remote False): short ones, and all of them on a mixed instance;
their leading blocks may come from a pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nodes.core.events import (
    Admitted,
    CannotPause,
    Computed,
    Emit,
    Gone,
    Grow,
    KvReady,
    NotAdmitted,
    Paused,
    Renew,
    SequenceSpec,
    Work,
)
from nodes.roles.base import BatchRole
from nodes.roles.leg import Leg
from nodes.roles.migration import Migration
from nodes.roles.refusals import refusal
from nodes.roles.shell import BatchShell
from transfer.errors import InvalidValue, Refused
from transfer.kv.port import KvKind, KvOffer, KvTrailer
from transfer.terms import RequestId, Role, TokenIds, unpack_tokens
from transfer.wire.messages import (
    KvReceived,
    Migrate,
    RequestLost,
    Reserve,
    Reserved,
)


class DecodeRole(BatchRole):
    role = Role.DECODE

    def reserve(self, message: Reserve) -> None:
        """Idempotent by (request_id, generation)."""
        try:
            tokens = unpack_tokens(message.tokens)
        except InvalidValue as error:
            self.refuse(message, str(error))
            return
        self.shell.admit(DecodeLeg(self.shell, message, tokens))

    def migrate(self, message: Migrate) -> None:
        leg = self._decode_leg(message.request_id, message.generation)
        if leg is None:
            self.refuse(message, "the request is not here")
        else:
            leg.migrate(message)

    # --- KvDelegate -----------------------------------------------------------------------------------------

    def kv_offered(self, offer: KvOffer) -> Sequence[int]:
        leg = self._decode_leg(offer.request_id, offer.generation)
        if leg is None:
            raise Refused(
                f"{self.shell.context.instance_id} holds no reservation for generation {offer.generation} of "
                f"request {offer.request_id}"
            )
        return leg.offered(offer)

    def kv_progress(self, offer: KvOffer) -> None:
        self.shell.handle(Renew(request_id=offer.request_id, generation=offer.generation))

    def kv_arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        leg = self._decode_leg(offer.request_id, offer.generation)
        if leg is None:
            raise Refused(f"the reservation of request {offer.request_id} has ended meanwhile")
        leg.arrived(offer, trailer)

    def kv_failed(self, offer: KvOffer, reason: str) -> None:
        leg = self._decode_leg(offer.request_id, offer.generation)
        if leg is not None:
            leg.failed(offer)

    def _decode_leg(self, request_id: RequestId, generation: int) -> DecodeLeg | None:
        leg = self.shell.leg(request_id, generation)
        return leg if isinstance(leg, DecodeLeg) else None


class DecodeLeg(Leg):
    """One request that generates here. Blocks that a peer may still write return only after the port's revoke, those
    that a fetch may write only after its end, those that a migration may still read only after its sender's abort."""

    def __init__(self, shell: BatchShell, message: Reserve, tokens: TokenIds) -> None:
        work, source = (Work.RECEIVE, None) if message.remote else (Work.LOCAL, message.source)
        super().__init__(
            shell,
            SequenceSpec(
                request_id=message.request_id, generation=message.generation, work=work, tokens=tokens,
                num_output=message.num_output, sampling=message.sampling, root=shell.context.root(message.salt),
                lease_s=message.lease_s, priority=message.priority, salt=message.salt,
                fetch_blocks=source.num_blocks if source else 0,
            ),
            source,
        )  # fmt: skip
        self._message = message
        self.tokens: TokenIds = list(tokens)
        self._offer: KvOffer | None = None
        self._reserved: Reserved | None = None
        self._receiving = message.remote
        self._migration: Migration | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._finished = self._over = False

    def admitted(self, effect: Admitted) -> None:
        super().admitted(effect)
        self._reserved = Reserved(
            request_id=self.request_id, generation=self.generation,
            have_tokens=effect.have_blocks * self.shell.context.block_size, free_blocks=effect.free_blocks,
        )  # fmt: skip
        self.shell.context.send(self._reserved)
        if self._source is not None:
            self._fetching = self.shell.spawn(self.fetch_leading(), f"fetch {self.request_id}", self._fetch_over)

    def repeated(self) -> None:
        """Answers again and renews the lease: so the control plane keeps it while a prefill waits in its queue."""
        if self._reserved is not None and self.aborted is None:
            self.shell.handle(Renew(request_id=self.request_id, generation=self.generation))
            self.shell.context.send(self._reserved)

    def refused(self, effect: NotAdmitted) -> None:
        if self.aborted is None:
            self.shell.context.send(
                refusal(self._message, effect.reason, retry=effect.retry, free_blocks=effect.free_blocks)
            )

    def computed(self, effect: Computed) -> None:
        self.shell.writer.offer(self.request_id, self.spec.tokens[:-1], self.spec.root)
        if self._source is not None:
            self.shell.context.send(self.prefill_done(effect, asyncio.get_running_loop().time()))

    def _fetch_over(self) -> None:
        """The fetch has ended, in whatever way. Where it was stopped the leg waited for that."""
        if not self._over and self._fetching is not None and self._fetching.cancelled():
            self.let_go(self.aborted or "the instance stops")

    # --- KV comes in ----------------------------------------------------------------------------------------

    def offered(self, offer: KvOffer) -> Sequence[int]:
        """Block ids to receive into. Raises Refused with what does not fit."""
        self._check_offer(offer)
        end = offer.first_block + offer.num_blocks
        if end > len(self.blocks) and offer.kind is KvKind.MIGRATION:
            self.shell.handle(Grow(request_id=self.request_id, generation=self.generation, num_blocks=end))
        if end > len(self.blocks) or not self._receiving:
            raise Refused(f"request {self.request_id} has {len(self.blocks)} blocks here, the offer needs {end}")
        self.shell.handle(Renew(request_id=self.request_id, generation=self.generation))
        self._offer = offer
        return self.blocks[offer.first_block : end]

    def _check_offer(self, offer: KvOffer) -> None:
        request = f"generation {self.generation} of request {self.request_id}"
        if not self._receiving or self.aborted is not None or (not self.blocks and offer.num_blocks):
            raise Refused(f"{request} does not wait for KV here")
        if self._offer is not None:
            raise Refused(f"KV of {request} is arriving already, from {self._offer.source}")
        if offer.kind is KvKind.STORE:
            raise Refused(f"{self.shell.context.instance_id} is not a KV pool")
        if offer.target_epoch != self.shell.context.epoch:
            raise Refused(f"{self.shell.context.instance_id} was restarted since {request} was placed")
        if offer.fingerprint != self.spec.root:
            raise Refused(f"KV of {request} was made by another model, layout or tenant; it cannot be used here")
        end, wanted = offer.first_block + offer.num_blocks, self._num_blocks(len(self.tokens))
        if end != wanted and (offer.kind is KvKind.HANDOFF or end < wanted):
            raise Refused(f"KV of {request} is needed up to block {wanted}, the offer ends at {end}")
        if offer.first_block != self.have_blocks:
            raise Refused(f"KV of {request} is needed from block {self.have_blocks}, offered from {offer.first_block}")

    def arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        """The KV is all here: generate. Raises Refused when it is not what was reserved for."""
        if not self._receiving or offer != self._offer:
            raise Refused(f"request {self.request_id} does not wait for this KV")
        tokens, num_output = None, 0
        if offer.kind is KvKind.MIGRATION:
            try:
                tokens, num_output = unpack_tokens(trailer.tokens), trailer.num_output
            except InvalidValue as error:
                raise Refused(str(error)) from None
        length = len(self.tokens if tokens is None else tokens)
        if trailer.num_tokens != length - 1 or offer.first_block + offer.num_blocks != self._num_blocks(length):
            raise Refused(f"KV of {trailer.num_tokens} tokens arrived for request {self.request_id}, not {length - 1}")
        self._receiving, self._offer = False, None
        self.shell.handle(
            KvReady(request_id=self.request_id, generation=self.generation, tokens=tokens, num_output=num_output)
        )
        if self.shell.leg(self.request_id, self.generation) is not self:
            raise Refused(f"request {self.request_id} could not go on here with the KV that arrived")
        if tokens is not None:
            self.tokens = tokens
        self.shell.context.send(KvReceived(request_id=self.request_id, generation=self.generation))

    def _num_blocks(self, length: int) -> int:
        """Blocks with KV of all tokens but the last, when there are `length`."""
        return self.shell.context.engine.layout.num_blocks(length - 1)

    def failed(self, offer: KvOffer) -> None:
        """The push ended early. The reservation stays for another try until its lease is over."""
        if offer == self._offer:
            self._offer = None

    # --- it generates, moves, ends --------------------------------------------------------------------------

    def emitted(self, effect: Emit) -> None:
        self.tokens.extend(effect.token_ids)
        self._finished = effect.finish is not None

    def migrate(self, message: Migrate) -> None:
        """A repeated message changes nothing."""
        if self._migration is None and self.aborted is None:
            self._migration = Migration(self.shell, self, message)
            self._migration.begin()

    def migration_over(self) -> None:
        self._migration = None

    def paused(self, effect: Paused) -> None:
        if self._migration is not None:
            self._migration.paused(effect)

    def cannot_pause(self, effect: CannotPause) -> None:
        if self._migration is not None:
            self._migration.cannot_pause(effect.reason)

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        if self._migration is not None:
            self._migration.abort()  # which drops the leg when nobody reads its blocks any more
        elif self._fetching is None or not self._fetching.cancel():  # _fetch_over follows
            self.let_go(reason)

    def gone(self, effect: Gone) -> None:
        self._receiving, self._over = False, True
        if self._migration is not None:
            self._migration.gone(effect)
        if self._fetching is not None:
            self._fetching.cancel()
        if self._finished:
            self.shell.ended(self.spec, self.tokens[:-1])
        elif effect.lost is not None and self.aborted is None:
            self.shell.context.send(
                RequestLost(request_id=self.request_id, generation=self.generation, reason=effect.lost)
            )
