"""The variables, arguments and folder that shell text has at a place, and what was noted on the way there."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field

from trainkit.convert.shell.values import Open, Reference, Value, refuse_endless, sole, text_of


@dataclass
class Scope:
    """What has been read so far.

    script: the file that holds the text, "" for a line. given: its arguments; called: whether there may be more that
    were not given. variables: lists are arrays. folder: where `cd` has led, from where the text began. asked: variables
    that the caller has set, which nothing overrules.
    """

    script: str = ""
    given: tuple[Value, ...] = ()
    called: bool = False
    variables: dict[str, Value | list[Value]] = field(default_factory=dict)
    exported: dict[str, None] = field(default_factory=dict)
    folder: str = ""
    asked: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def note(self, remark: str) -> None:
        """Keep a remark, once."""
        if remark not in self.remarks:
            self.remarks.append(remark)

    def go(self, folder: str, written: str) -> None:
        """Change the folder, as `cd` does. written: the command."""
        if not folder or posixpath.isabs(folder) or folder == "-":
            self.note(f"`{written[:100]}` is not taken over: call trainkit in that folder.")
        else:
            path = posixpath.normpath(posixpath.join(self.folder, folder))
            self.folder = "" if path == "." else path

    def assign(self, name: str, value: Value | list[Value], written: str = "") -> None:
        """Set a variable. What is not known becomes a reference to a variable of this name."""
        if name in self.asked:
            return
        if isinstance(value, tuple):
            only = sole(value)
            if isinstance(only, Reference) and re.fullmatch(r"ARG\d+", only.name):
                value = (Reference(name, only.otherwise),)
            elif isinstance(only, Open) and only.otherwise is not None:
                self.note(f"{name} is {only.otherwise}, which is `{only.text}` with the defaults: set both together.")
                value = (Reference(name, only.otherwise),)
            elif any(isinstance(part, Open) for part in value):
                self.note(f"{name} is what `{written[:100]}` comes to where the text runs: export it before the run.")
                value = (Reference(name),)
        parts = value if isinstance(value, tuple) else [part for each in value for part in each]
        refuse_endless(sum(len(part) for part in parts if isinstance(part, str)), name)
        self.variables[name] = value

    def argument(self, number: int) -> Value:
        """A positional argument."""
        if number == 0:
            return (self.script or "bash",)
        if number <= len(self.given):
            return self.given[number - 1]
        return () if self.called else (Reference(f"ARG{number}"),)

    def variable(self, name: str) -> Value | list[Value]:
        """A variable, or a reference to the environment."""
        if name.isdecimal():
            return self.argument(int(name))
        if name in ("@", "*"):
            return list(self.given)
        if name == "#":
            return (str(len(self.given)),)
        if name in self.asked:
            return (self.asked[name],)
        if name == "PWD" and name not in self.variables:
            return (self.folder or ".",)
        if name == "BASH_SOURCE":
            return (self.script,)
        return self.variables.get(name, (Reference(name),))

    def separators(self) -> str:
        """IFS: the first joins the elements of "${A[*]}", and any of them ends a word of a variable without quotes."""
        found = self.variables.get("IFS", (" \t\n",))
        shown = text_of(found) if isinstance(found, tuple) else None
        return " \t\n" if shown is None else shown

    def split(self, written: str) -> list[str]:
        """The words of a variable without quotes."""
        blank, other = ("".join(each for each in self.separators() if each.isspace() is kind) for kind in (True, False))
        blanks = f"[{re.escape(blank)}]" if blank else ""
        kinds = ([f"{blanks and blanks + '*'}[{re.escape(other)}]{blanks and blanks + '*'}"] if other else []) + (
            [f"{blanks}+"] if blank else []
        )
        pattern = "|".join(kinds)
        return re.split(pattern, written) if pattern else [written]

    def is_set(self, name: str) -> bool:
        """Whether the text, or the caller, gives a variable a value that is known to be one."""
        return name in self.variables or name in self.asked or (name.isdecimal() and int(name) <= len(self.given))
