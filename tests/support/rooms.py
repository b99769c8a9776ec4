"""The rooms of the code and the arrows between them: the layer test checks them, the drawing shows them."""

from __future__ import annotations

# Each room, from the top: what lies in it (a folder, or files of the root), and the rooms that it may use besides
# itself. It says less than "everything below": a provider knows no store.
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    "cli": (
        {"cli", "__main__"},
        {"worker", "doors", "memory", "maintenance", "threads", "tools", "providers", "values"},
    ),
    "worker": (
        {"worker"},
        {"doors", "run", "tasks", "threads", "queries", "store", "middleware", "tools", "values"},
    ),
    "adapters": ({"adapters"}, {"memory", "values"}),
    "doors": (
        {"__init__", "agent", "apps", "checkpointer", "config", "storage", "testing"},
        {"run", "maintenance", "search", "accounts", "tasks", "threads", "queries", "store", "middleware", "tools"}
        | {"providers", "values"},
    ),
    "memory": ({"memory"}, {"search", "threads", "queries", "store", "middleware", "providers", "values"}),
    "maintenance": ({"maintenance"}, {"search", "accounts", "threads", "queries", "store", "values"}),
    "run": ({"run"}, {"threads", "queries", "store", "middleware", "tools", "providers", "values"}),
    "search": ({"search"}, {"accounts", "threads", "queries", "store", "values"}),
    "accounts": ({"accounts"}, {"tasks", "threads", "queries", "store", "values"}),
    "tasks": ({"tasks"}, {"threads", "queries", "store", "values"}),
    "threads": ({"threads"}, {"queries", "store", "values"}),
    "queries": ({"queries"}, {"store", "values"}),
    "store": ({"store"}, {"values"}),
    "middleware": ({"middleware"}, {"tools", "providers", "values"}),
    "tools": ({"tools"}, {"providers", "values"}),
    "providers": ({"providers"}, {"values"}),
    "values": ({"values", "errors", "events", "messages", "signals", "stream", "telemetry"}, set()),
}
