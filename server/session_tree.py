"""`longtake sessions show`: the sessions that a session was forked from, and those forked from them."""

from rich.tree import Tree

from longtake.api_schemas.resources import Session
from longtake.client import Client, ServerProblem

MOST = 200
"""Sessions that are shown."""


def family_tree(client: Client, session: Session) -> Tree | None:
    """The tree of forks that a session belongs to, as far as its sessions are there; None when it stands alone."""
    root = session
    while root.parent is not None and (parent := _found(client, root.parent)) is not None:
        root = parent
    if root is session and not session.forks:
        return None
    tree = Tree(_line(root, session))
    left, branches = MOST, [(root, tree)]
    while branches and left:
        parent, branch = branches.pop()
        for link in parent.forks[:left]:
            if (fork := _found(client, link.id)) is not None:
                branches.append((fork, branch.add(_line(fork, session))))
                left -= 1
    return tree


def _line(session: Session, shown: Session) -> str:
    origin = "" if session.forked_at is None else f"  from chunk {session.forked_at}"
    mark = "[bold]" if session.id == shown.id else ""
    return f"{mark}{session.id}  {session.next_chunk} chunks{origin}"


def _found(client: Client, session_id: str) -> Session | None:
    try:
        return client.session(session_id)
    except ServerProblem as problem:
        if problem.code != "session_not_found":
            raise
        return None
