"""Memory: one store, one embedder, one index. What the agent talks to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import insert, select, update

from memstream.config import RecallConfig
from memstream.errors import ConfigError, InputError
from memstream.memory import forgetting, gate, keys
from memstream.memory.embedder import Embedder
from memstream.memory.handle import ConversationHandle
from memstream.memory.hits import Hit, Ranked, through_the_gate
from memstream.memory.indexer import Indexer
from memstream.memory.live_index import LiveIndex
from memstream.memory.packing import CountTokens, Recall, pack
from memstream.memory.present import pinned_facts, recalled, unscored
from memstream.memory.reranker import Reranker, rerank
from memstream.memory.retriever import Retriever
from memstream.memory.summaries import Summaries
from memstream.memory.summarizer import Summarizer
from memstream.memory.verify import VerifyReport, verify
from memstream.memory.view import view_of
from memstream.report import ForgetReceipt, Recalled, SummaryCounts
from memstream.stores import fulltext, rows, vectors
from memstream.stores import schema as db
from memstream.stores.base import Scope, storable_text
from memstream.stores.rows import ConversationInfo
from memstream.stores.sql import SqlStore

_LEXICAL_GATE = -0.05  # without an embedder, two fifths of the words that were asked for let a memory in


class Memory:
    """Remembers for all conversations of a store. Thread safe.

    A background thread embeds and summarises; nothing a reply waits for does. Vectors not made yet when the process
    dies are made by the next one.

    Attributes:
        config: how much is recalled, and the gate; may be replaced between turns.

    Args:
        store: an open store; closed with the memory.
        embedder: None searches words only.
        recall: how much is recalled, and the gate.
        index: ``auto``, ``exact``, ``faiss``, or ``faiss:`` and FAISS's own description; see ``LiveIndex``.
        summarizer: summarises exchanges that left a window, in a thread of its own; None takes whole sentences of them.
        reranker: puts the best hits into a better order; None leaves them as they are.
        summaries_believed: False rejects a summary that names a number or a name that its turns do not.

    Raises:
        DimensionMismatchError: the store's vectors were made by another embedder.
    """

    def __init__(
        self,
        store: SqlStore,
        embedder: Embedder | None,
        recall: RecallConfig,
        *,
        index: str = "auto",
        summarizer: Summarizer | None = None,
        summaries_believed: bool = True,
        reranker: Reranker | None = None,
    ) -> None:
        self.store = store
        self._embedder = embedder
        self.config = recall
        self._index = LiveIndex(store, index, lazy=not recall.enabled)
        self._retriever = Retriever(store, self._index, embedder)
        self._reranker = reranker
        self._gate: float | None = recall.gate
        self._closed = False
        self._indexer = Indexer(store, self._index, embedder)
        self._summaries = Summaries(store, summarizer, believed=summaries_believed, stored=self._indexer.wake)
        if embedder is not None:
            self._check_space(embedder)
            self._indexer.wake()

    def _check_space(self, embedder: Embedder) -> None:
        with self.store.read() as connection:
            space = vectors.find_space(connection)
        if space is None:
            with self.store.write() as connection:
                vectors.ensure_space(connection, embedder.name, embedder.fingerprint, embedder.dimension)
        else:
            vectors.check_space(space, embedder.name, embedder.fingerprint, embedder.dimension)

    # --- conversations

    def open_conversation(self, scope: Scope, *, wait_s: float = 0.0) -> ConversationHandle:
        """Opens a conversation for this process alone, creating it if new; turns a crash left open become cut.

        Args:
            scope: with the conversation's name.
            wait_s: seconds to wait for another owner.

        Raises:
            ConversationBusyError: another owner has it.
        """
        if scope.conversation is None:
            raise ConfigError("Scope.conversation is None; name the conversation to open")
        with self.store.write() as connection:
            conversation_id = rows.ensure_conversation(connection, scope)
        release = self.store.lock_conversation(conversation_id, name=scope.conversation, wait_s=wait_s)
        try:
            with self.store.write() as connection:
                if rows.find_conversation(connection, scope) != conversation_id:
                    raise InputError(f"conversation {scope.conversation!r} was deleted or renamed meanwhile")
                for turn_id in rows.open_turns(connection, conversation_id):
                    rows.finish_turn(connection, conversation_id, turn_id, None, None, "cut")
                keys.add_windows(connection, conversation_id)
        except BaseException:
            release()
            raise
        self._indexer.wake()
        return ConversationHandle(
            self.store,
            conversation_id,
            scope,
            release=release,
            indexed=self._indexer.wake,
            summarise=self._summaries.add,
            catch_up=self._summaries.catch_up,
        )

    def list_conversations(self, scope: Scope) -> list[ConversationInfo]:
        """The conversations of the scope's (namespace, user), oldest first."""
        with self.store.read() as connection:
            return rows.conversations(connection, scope)

    def list_users(self, namespace: str) -> list[str]:
        """The users of a namespace that have anything stored: for operators, not for conversations."""
        with self.store.read() as connection:
            return rows.users(connection, namespace)

    def scope_of(self, memory_id: str) -> Scope | None:
        """Whose a memory is; None where there is none under that id: for operators, not for conversations."""
        with self.store.read() as connection:
            return forgetting.scope_of(connection, memory_id)

    def rename_conversation(self, scope: Scope, name: str) -> None:
        """Renames the scope's conversation.

        Raises:
            InputError: there is none, or the new name is taken.
            ConversationBusyError: it is open.
        """
        renamed = Scope(scope.namespace, scope.user, name)
        with self._alone(scope) as conversation_id, self.store.write() as connection:
            if rows.find_conversation(connection, renamed) is not None:
                raise InputError(f"there is a conversation {name!r} already")
            connection.execute(update(db.Conversation).where(db.Conversation.id == conversation_id).values(name=name))

    def delete_conversation(self, scope: Scope) -> None:
        """Removes the scope's conversation with everything in it, as completely as ``forget``.

        Raises:
            InputError: there is none.
            ConversationBusyError: it is open.
        """
        with self._alone(scope) as conversation_id, self.store.write() as connection:
            forgetting.delete_conversation(self.store, connection, conversation_id)
        self._purge()

    @contextmanager
    def _alone(self, scope: Scope) -> Iterator[int]:
        """Owns the scope's conversation for one step; gives its id."""
        with self.store.read() as connection:
            conversation_id = rows.find_conversation(connection, scope)
        if conversation_id is None or scope.conversation is None:
            raise InputError(f"there is no conversation {scope.conversation!r} for {scope}")
        release = self.store.lock_conversation(conversation_id, name=scope.conversation, wait_s=0.0)
        try:
            yield conversation_id
        finally:
            release()

    # --- recall

    def recall(
        self,
        scope: Scope,
        query_turns: Sequence[str],
        *,
        window_from: int | None,
        budget_tokens: int,
        count_tokens: CountTokens,
    ) -> Recall:
        """Finds what matters for the latest turns; nothing is a normal outcome.

        Searches everything of (namespace, user), or of the one conversation where there is no user.

        Args:
            scope: of the asking conversation.
            query_turns: the latest turns, newest last.
            window_from: turns of the asking conversation from this sequence on are in its window and are left out;
                None leaves none out.
            budget_tokens: room for all notes.
            count_tokens: number of tokens a note's text takes when it is rendered.
        """
        if not self.config.enabled:
            return Recall()
        ranked = self._rank(scope, query_turns[-self.config.query_turns :], window_from)
        passed = self._reranked(query_turns, through_the_gate(ranked.hits))
        with self.store.read() as connection:
            view = view_of(connection, scope, window_from)
            pinned = [] if view is None else pinned_facts(connection, view)
            found = recalled(connection, passed)
        notes = pack(
            pinned,
            found,
            max_notes=self.config.max_notes,
            budget_tokens=budget_tokens,
            count_tokens=count_tokens,
        )
        return Recall(
            notes=notes,
            n_considered=ranked.n_considered,
            best_score=ranked.hits[0].score if ranked.hits else None,
            gated=bool(ranked.hits) and not passed,
        )

    def search(self, scope: Scope, query: str, *, limit: int = 10) -> list[Recalled]:
        """The best memories of a scope for a query, best first, each with why; any shared word is a match."""
        found = self._reranked([query], self._matches(scope, query))
        with self.store.read() as connection:
            return recalled(connection, found[:limit])

    def _matches(self, scope: Scope, query: str) -> list[Hit]:
        hits = self._rank(scope, [query], None).hits
        return [hit for hit in hits if hit.terms or (hit.near and hit.evidence >= 0)]

    def _reranked(self, query_turns: Sequence[str], hits: list[Hit]) -> list[Hit]:
        """Hits in the order in which they are to be taken."""
        if self._reranker is None or not hits:
            return hits
        return rerank(self._reranker, query_turns[-1], hits, self.config.rerank_hits)

    def _rank(self, scope: Scope, query_turns: Sequence[str], window_from: int | None) -> Ranked:
        return self._retriever.rank(
            scope, query_turns, window_from=window_from, gate=self._gate_value(), today=db.now().date()
        )

    def memories(self, scope: Scope, *, limit: int = 50) -> list[Recalled]:
        """The newest facts and live turns of a scope, oldest of them first."""
        with self.store.read() as connection:
            view = view_of(connection, scope, None)
            if view is None:
                return []
            newest = select(db.Turn.id).join(db.Conversation).where(view.turns()).order_by(db.Turn.id.desc())
            turns = rows.turns_by_id(connection, list(connection.scalars(newest.limit(limit))))
            hits = [unscored(turn=turn) for _, turn in sorted(turns.items())]
            return pinned_facts(connection, view)[::-1] + recalled(connection, hits)

    def show(self, scope: Scope, memory_id: str) -> Recalled:
        """One memory in full.

        Raises:
            InputError: the scope has none under that id.
        """
        with self.store.read() as connection:
            _, memory = forgetting.find(connection, scope, memory_id)
            hit = unscored(turn=memory) if isinstance(memory, rows.Turn) else unscored(fact=(memory.id, memory.text))
            return recalled(connection, [hit])[0]

    def remember(self, scope: Scope, text: str) -> str:
        """Stores a fact and pins it: it is recalled every time. Returns its id, such as ``fact:3``.

        Raises:
            InputError: the text is empty.
            ConfigError: the scope names neither a user nor a conversation.
        """
        text = storable_text(text).strip()
        if not text:
            raise InputError("there is nothing to remember: the text is empty")
        if scope.user is None and scope.conversation is None:
            raise ConfigError("a fact needs a user or a conversation to belong to")
        with self.store.write() as connection:
            owner_id = rows.ensure_owner(connection, scope)
            conversation_id = None if scope.user is not None else rows.ensure_conversation(connection, scope)
            values = {"owner_id": owner_id, "conversation_id": conversation_id, "text": text}
            statement = insert(db.Fact).values(**values, created=db.now()).returning(db.Fact.id)
            fact_id = connection.execute(statement).scalar_one()
            connection.execute(insert(db.Pin).values(fact_id=fact_id, created=db.now()))
            connection.execute(insert(db.Chunk).values(**values, kind="fact", fact_id=fact_id))
            fulltext.add_fact(connection, fact_id, owner_id, conversation_id, text)
        self._indexer.wake()
        return f"fact:{fact_id}"

    # --- forgetting and checking

    def forget(self, scope: Scope, memory_id: str) -> ForgetReceipt:
        """Forgets a memory completely, down to the bytes in the store's files.

        Returns:
            A receipt; ``verified`` says that searching again, in words, vectors and index, found nothing of it and
            that the files were wiped.

        Raises:
            InputError: the scope has none under that id.
        """
        done = forgetting.forget(self.store, scope, memory_id)
        wiped = self._purge()
        for conversation_id, sources in done.summaries:
            self._summaries.add(conversation_id, sources)
        self._indexer.wake()
        matches = self._matches(scope, done.text)
        with self.store.read() as connection:
            found = {hit.id for hit in recalled(connection, matches)}
            left = connection.scalars(select(db.Chunk.id).where(db.Chunk.id.in_(done.chunk_ids))).all()
        verified = wiped and memory_id not in found and not left and not self._index.holds(done.chunk_ids)
        return ForgetReceipt(
            id=memory_id,
            removed=done.removed,
            snapshots=done.n_snapshots,
            caches=0,
            echoes=done.echoes,
            verified=verified,
        )

    def _purge(self) -> bool:
        """Takes deleted vectors out of the index and its file, and deleted words out of SQLite's files."""
        self._index.refresh()
        self._index.checkpoint()
        return self.store.purge()

    def verify(self) -> VerifyReport:
        """Checks that the store is whole and that everything in it agrees; see ``VerifyReport.problems``."""
        return verify(self.store, self._index)

    def _gate_value(self) -> float:
        """The least cosine of a hit: as configured, as calibrated before, or calibrated now."""
        if self._embedder is None:
            return _LEXICAL_GATE
        if self._gate is not None:
            return self._gate
        with self.store.read() as connection:
            space = vectors.find_space(connection)
        assert space is not None
        found = space.gate
        if found is None:
            found = gate.calibrate(self._embedder)
            with self.store.write() as connection:
                vectors.set_gate(connection, space.id, found)
        self._gate = found  # threads that come here at once find the same
        return found

    def warm_up(self) -> None:
        """Loads embedder, index and gate in the background, so that the first recall need not wait for them."""
        self._indexer.warm_up(self._gate_value)

    def flush(self) -> None:
        """Waits until everything said so far is summarised, embedded and indexed.

        Raises:
            MemstreamError: what went wrong in the background since the last flush.
        """
        try:
            self._summaries.flush()
        finally:
            self._indexer.flush()

    @property
    def summaries(self) -> SummaryCounts:
        """How many summaries were made so far, and by whom."""
        return self._summaries.counts

    def close(self) -> None:
        """Finishes the background work, saves the index and closes the store; closing twice is harmless.

        A chosen summariser is not asked any more: what waits for it gets the extractive summary.
        """
        if self._closed:
            return
        self._closed = True
        self._summaries.hurry()
        try:
            self.flush()
            self._index.checkpoint()
        finally:
            self._summaries.shutdown()
            self._indexer.shutdown()
            self.store.close()
