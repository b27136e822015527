"""Memory: one store, one embedder, one index. What the agent talks to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import Connection, select, update

from memstream.config import RecallConfig
from memstream.errors import ConfigError, InputError
from memstream.memory import facts, forgetting, keys, present
from memstream.memory.documents import Adding, Told
from memstream.memory.embedder import Embedder, Embedders
from memstream.memory.gate import Gate
from memstream.memory.handle import ConversationHandle, sweep_snapshots
from memstream.memory.hits import Hit, Ranked, through_the_gate
from memstream.memory.indexer import Indexer
from memstream.memory.live_index import open_index
from memstream.memory.packing import CountTokens, Recall, pack
from memstream.memory.present import pinned_facts, recalled, unscored
from memstream.memory.reranker import Reranker, rerank
from memstream.memory.retriever import Retriever
from memstream.memory.sources import Document, Paths
from memstream.memory.summaries import Summaries
from memstream.memory.summarizer import Summarizer
from memstream.memory.upkeep import Upkeep
from memstream.memory.view import view_of
from memstream.report import AddedDocuments, DocumentInfo, ForgetReceipt, Recalled, SummaryCounts
from memstream.stores import documents as stored_documents
from memstream.stores import rows, vectors
from memstream.stores import schema as db
from memstream.stores.base import Scope, storable_text
from memstream.stores.rows import ConversationInfo
from memstream.stores.sql import SqlStore

_MOST_PINNED = 1000  # pinned facts, the newest, that a recall looks at
_TEXTS_SOUGHT = 8  # of a document's passages, those that are searched for again once they are forgotten


class Memory(Upkeep):
    """Remembers for all conversations of a store. Thread safe.

    A background thread embeds and summarises; nothing a reply waits for does. Vectors not made yet when the process
    dies are made by the next one.

    Attributes:
        config: how much is recalled, and the gate; may be replaced between turns.

    Args:
        store: an open store; closed with the memory.
        embedder: None searches words only.
        recall: how much is recalled, and the gate.
        index: ``auto``, ``exact``, ``faiss``, ``faiss:`` and FAISS's own description, or ``pgvector``; see
            ``open_index``.
        summarizer: summarises exchanges that left a window, in a thread of its own; None takes whole sentences of them.
        summaries_believed: False rejects a summary that names a number or a name that its turns do not.
        reranker: puts the best hits into a better order; None leaves them as they are.

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
        self._embedders = Embedders(embedder)
        self.config = recall
        self._index = open_index(store, index, lazy=not recall.enabled)
        self._retriever = Retriever(store, self._index, self._embedders)
        self._reranker = reranker
        self._gate = Gate(store, self._index, self._embedders)
        self._closed = False
        self._indexer = Indexer(store, self._index, self._embedders)
        self._summaries = Summaries(store, summarizer, believed=summaries_believed, stored=self._indexer.wake)
        if embedder is not None:
            self._check_space(embedder)
            self._indexer.wake()
        if store.owes_purge:  # who deleted it was killed, or the disk was full
            self._indexer.run(self._purge)

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
        with self.store.read() as connection:
            found = rows.find_conversation(connection, scope)
        if found is None:
            with self.store.write() as connection:
                found = rows.ensure_conversation(connection, scope)
        conversation_id = found
        release = self.store.lock_conversation(conversation_id, name=scope.conversation, wait_s=wait_s)
        try:
            with self.store.write() as connection:
                if rows.find_conversation(connection, scope) != conversation_id:
                    raise InputError(f"conversation {scope.conversation!r} was deleted or renamed meanwhile")
                for turn_id in rows.open_turns(connection, conversation_id):
                    rows.finish_turn(connection, conversation_id, turn_id, None, None, "cut")
                keys.add_windows(connection, conversation_id)
                sweep_snapshots(self.store, connection, conversation_id)
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

    def ask_for(self, scope: Scope) -> None:
        """Asks the process that owns the scope's conversation to give it up when it can; only over PostgreSQL."""
        with self.store.read() as connection:
            conversation_id = rows.find_conversation(connection, scope)
        if conversation_id is not None:
            self.store.ask_for(conversation_id)

    def list_conversations(self, scope: Scope) -> list[ConversationInfo]:
        """The conversations of the scope's (namespace, user), oldest first."""
        with self.store.read() as connection:
            return rows.conversations(connection, Scope(scope.namespace, scope.user))

    def find_conversation(self, scope: Scope) -> ConversationInfo | None:
        """The scope's conversation; None where there is none."""
        with self.store.read() as connection:
            return next(iter(rows.conversations(connection, scope)), None)

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
        with self._alone(scope) as (connection, conversation_id):
            if rows.find_conversation(connection, renamed) is not None:
                raise InputError(f"there is a conversation {name!r} already")
            connection.execute(update(db.Conversation).where(db.Conversation.id == conversation_id).values(name=name))

    def delete_conversation(self, scope: Scope, *, wait_s: float = 0.0) -> None:
        """Removes the scope's conversation with everything in it, as completely as ``forget``.

        Args:
            scope: with the conversation's name.
            wait_s: seconds to wait for whoever has it open.

        Raises:
            InputError: there is none.
            ConversationBusyError: it is open.
        """
        with self._alone(scope, wait_s) as (connection, conversation_id):
            forgetting.delete_conversation(self.store, connection, conversation_id)
        self._purge()

    @contextmanager
    def _alone(self, scope: Scope, wait_s: float = 0.0) -> Iterator[tuple[Connection, int]]:
        """Owns the scope's conversation for one transaction; gives its id."""
        with self.store.read() as connection:
            conversation_id = rows.find_conversation(connection, scope)
        if conversation_id is None or scope.conversation is None:
            raise InputError(f"there is no conversation {scope.conversation!r} for {scope}")
        release = self.store.lock_conversation(conversation_id, name=scope.conversation, wait_s=wait_s)
        try:
            with self.store.write() as connection:
                if rows.find_conversation(connection, scope) != conversation_id:
                    raise InputError(f"conversation {scope.conversation!r} was deleted or renamed meanwhile")
                yield connection, conversation_id
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

        Searches everything of (namespace, user), or of the one conversation where there is no user, and the shared
        knowledge of the namespace. What tools returned leads to what was said about it; it is not recalled itself:
        nobody said it, and it may be out of date.

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
        hits = [hit for hit in ranked.hits if hit.turn is None or hit.turn.role not in rows.TOOL_ROLES]
        passed = self._reranked(query_turns, through_the_gate(hits))
        with self.store.read() as connection:
            view = view_of(connection, scope, window_from)
            pinned = [] if view is None else pinned_facts(connection, view, limit=_MOST_PINNED)
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
            best_score=ranked.best_score,
            gated=ranked.best_score is not None and not passed,
        )

    def search(self, scope: Scope, query: str, *, limit: int = 10) -> list[Recalled]:
        """The best memories of a scope for a query, best first, each with why; any shared word is a match."""
        found = self._reranked([query], self._matches(scope, query))
        with self.store.read() as connection:
            return recalled(connection, found[:limit])

    def _matches(self, scope: Scope, query: str) -> list[Hit]:
        hits = self._rank(scope, [query], None).hits
        return [hit for hit in hits if hit.terms or hit.evidence >= 0]

    def _found_again(self, scope: Scope, texts: Iterable[str]) -> set[str]:
        """The ids of what searching for texts finds, whatever a reranker would think of it."""
        matches = [hit for text in texts for hit in self._matches(scope, text)]
        with self.store.read() as connection:
            return {hit.id for hit in recalled(connection, matches)}

    def _reranked(self, query_turns: Sequence[str], hits: list[Hit]) -> list[Hit]:
        """Hits in the order in which they are to be taken."""
        if self._reranker is None or not hits:
            return hits
        return rerank(self._reranker, query_turns[-1], hits, self.config.rerank_hits)

    def _rank(self, scope: Scope, query_turns: Sequence[str], window_from: int | None) -> Ranked:
        return self._retriever.rank(
            scope,
            query_turns,
            window_from=window_from,
            gate=lambda: self._gate.value(self.config.gate),
            today=db.now().date(),
        )

    def memories(self, scope: Scope, *, limit: int = 50) -> list[Recalled]:
        """The newest documents (by their titles), facts and live turns of a scope, oldest of them first."""
        with self.store.read() as connection:
            view = view_of(connection, scope, None)
            if view is None:
                return []
            newest = select(db.Turn.id).join(db.Conversation).where(view.turns()).order_by(db.Turn.id.desc())
            turns = rows.turns_by_id(connection, list(connection.scalars(newest.limit(limit), view.values())))
            hits = [unscored(turn=turn) for _, turn in sorted(turns.items())]
            own = stored_documents.of_owner(connection, view.owner_id, limit=limit)
            titles = [present.listed(document) for document in own]
            return titles + pinned_facts(connection, view)[::-1] + recalled(connection, hits)

    def show(self, scope: Scope, memory_id: str) -> Recalled:
        """One memory in full, or a document that the scope may read.

        Raises:
            InputError: the scope has none under that id.
        """
        with self.store.read() as connection:
            _, memory = forgetting.find(connection, scope, memory_id, reading=True)
            return present.whole(connection, memory)

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
            raise ConfigError("a fact needs a user or a conversation to belong to; shared knowledge takes documents")
        with self.store.write() as connection:
            owner_id = rows.ensure_owner(connection, scope)
            conversation_id = None if scope.user is not None else rows.ensure_conversation(connection, scope)
            fact_id, _ = facts.add(connection, owner_id, conversation_id, text, created=db.now(), pinned=True)
        self._indexer.wake()
        return f"fact:{fact_id}"

    # --- documents

    def add_documents(
        self,
        scope: Scope,
        documents: Paths | Document | Iterable[Paths | Document],
        *,
        sync: bool = False,
        told: Told | None = None,
    ) -> AddedDocuments:
        """Adds documents, which are recalled by passages, with a citation; what did not change is left as it is.

        A file is told by its path and a text by its name: added again, it takes the place of what was there, and
        passages that are the same keep their vectors. What is gone from a document is forgotten as by ``forget``.
        Each document is stored in one transaction; after an error or a crash, adding the same again goes on from there.

        Args:
            scope: ``Scope(namespace, knowledge=True)`` for what all conversations of the namespace may recall; or of a
                user, for their conversations alone.
            documents: files (Markdown, JSON lines by their suffix, anything else as plain text), folders, texts.
            sync: also removes the documents of files that are gone from the folders given.
            told: is called with the name of each document that is done.

        Raises:
            InputError: a file is missing, unreadable, not UTF-8, or a line of it no record; those before it are stored.
            ConfigError: the scope is of a conversation without a user.
        """
        adding = Adding(self.store, scope, told)
        try:
            return adding.run(documents, sync=sync)
        finally:
            if adding.finish():
                self._purge()
            self._indexer.wake()

    def documents(self, scope: Scope) -> list[DocumentInfo]:
        """The documents of a user, or of the shared knowledge of a namespace, in the order they were added."""
        with self.store.read() as connection:
            owner_id = rows.find_owner(connection, scope)
            found = [] if owner_id is None else stored_documents.of_owner(connection, owner_id)
        return [present.info(document) for document in found]

    # --- forgetting

    def forget(self, scope: Scope, memory_id: str) -> ForgetReceipt:
        """Forgets a memory completely, down to the bytes in the store's files.

        Returns:
            A receipt; ``verified`` says that searching again, in words, vectors and index, found nothing of it and
            that the files were wiped.

        Raises:
            InputError: the scope has none under that id.
        """
        done = forgetting.forget(self.store, scope, memory_id)
        wiped = self._purge(None if done.owed_more else done.texts)
        for conversation_id, sources in done.summaries:
            self._summaries.add(conversation_id, sources)
        self._indexer.wake()
        found = self._found_again(scope, done.texts[:_TEXTS_SOUGHT])
        with self.store.read() as connection:
            left = connection.scalars(select(db.Chunk.id).where(db.Chunk.id.in_(done.chunk_ids))).all()
        verified = wiped and found.isdisjoint(done.ids) and not left and not self._index.holds(done.chunk_ids)
        return ForgetReceipt(
            id=memory_id,
            removed=done.removed,
            snapshots=done.n_snapshots,
            caches=0,
            echoes=done.echoes,
            verified=verified,
        )

    def warm_up(self) -> None:
        """Loads embedder, index and gate in the background, so that the first recall need not wait for them."""
        self._indexer.warm_up(lambda: self._gate.value(self.config.gate))

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
            if self.store.owes_purge:
                self._purge()
        finally:
            self._summaries.shutdown()
            self._indexer.shutdown()
            self.store.close()
