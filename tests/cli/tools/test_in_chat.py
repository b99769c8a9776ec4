"""The ready-made tools in a real chat: a write with its difference, and a command that `kill -9` interrupts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from byssus import ToolCall
from tests.support.window import Window
from tests.support.wire import OpenAI, Server


@pytest.mark.processes
def test_the_local_model_is_not_chosen_where_there_are_tools(tmp_path: Path) -> None:
    env = {"BYSSUS_DB": str(tmp_path / "a.db"), "OPENAI_API_KEY": "sk-secret"}
    chat = ("chat", "t", "--tools", "time", "--model", "openai:gpt-x")
    with Window(*chat, home=tmp_path, env=env, columns=100) as window:
        window.wait_for("gpt-x")
        window.enter("/model local")
        window.wait_for("the local model is too small to use tools")
        window.press("ctrl-c")
        window.enter("/model openai:gpt-y")
        window.wait_for("(from now on openai:gpt-y answers)")
        window.enter("/system Be brief.")
        window.wait_for("(the system prompt is another one from now on")
        window.enter("/system")
        window.wait_for("system prompt: Be brief.")


@pytest.mark.processes
def test_after_kill_9_in_a_command_the_chat_asks_what_to_do_about_it(tmp_path: Path) -> None:
    write = ToolCall("c1", "write_file", {"path": "new.txt", "content": "hello\nworld\n"})
    run = ToolCall("c2", "shell", {"command": "echo $$ >> pids; echo wor''king; sleep 600"})
    pids = tmp_path / "pids"
    with Server([OpenAI.answer(write), OpenAI.answer(run), OpenAI.answer("So be it.")]) as server:
        env = {"BYSSUS_DB": str(tmp_path / "a.db"), "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "sk-secret"}
        chat = ("chat", "t", "--tools", "files,shell", "--model", "openai:gpt-x")
        with Window(*chat, home=tmp_path, env=env, columns=160, rows=40) as window:
            window.wait_for("gpt-x")
            window.enter("Do it.")
            window.wait_for_on_screen("Make the file new.txt? 2 lines added, 0 removed.", "+hello", "+world", "allow?")
            assert not (tmp_path / "new.txt").exists()
            window.enter("y")
            window.wait_for_on_screen("Run this command?", f"folder: {tmp_path}", "allow?")
            assert (tmp_path / "new.txt").read_text() == "hello\nworld\n"
            window.enter("a")  # would allow any command
            window.wait_for_on_screen("'a' is no answer here: y yes, n [WHY] no, e edit, Esc later")
            window.enter("y")
            window.wait_for_on_screen("working")  # the output of the command, as it comes
            window.kill()
        group = int(pids.read_text())
        try:
            with Window(*chat, home=tmp_path, env=env, columns=160, rows=40) as window:
                window.wait_for_on_screen("The last run on this thread was interrupted.", "resume?")
                window.enter("y")
                window.wait_for_on_screen("it may or may not have taken effect", "what now?")
                window.enter("n once is enough")
                window.wait_for("So be it.")
            assert int(pids.read_text()) == group
        finally:
            os.killpg(group, signal.SIGKILL)  # what was started lives on when the chat is killed
