"""Reads the command line of `bagua-launch` and reports mistakes in it.

Owns the click classes: `run` is the default command, dashes and underscores are alike, options are
grouped in --help, and every mistake is one line on stderr and exit code 2. Does not know options by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from bagua_agent.base.errors import InfrastructureLost, PeerViolation, UserError
from bagua_agent.base.plain_text import plain_line
from bagua_launch.errors import refuse
from bagua_launch.option_suggestions import nearest
from bagua_launch.options import Option
from bagua_launch.written_values import WrittenValue

PROGRAM = "bagua-launch"
INTERRUPTED = 130
_LEFT_COLUMN = 32

CONTEXT: MutableMapping[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "allow_interspersed_args": False,  # what follows the script is the script's, whatever it looks like
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


class OptionOf(click.Option):
    """A row of options.py as click sees it. Values stay text: job_request.py says what they mean."""

    def __init__(self, row: Option) -> None:
        names = list(row.flags)
        if row.is_switch:
            super().__init__(names, is_flag=True, default=False, help=row.help, hidden=row.hidden)
        else:
            metavar = f"[{row.metavar}]" if row.bare_value else row.metavar
            super().__init__(names, type=str, metavar=metavar, help=row.help, hidden=row.hidden)
        self.row = row


def whole_flags(words: Sequence[str], rows: Iterable[Option]) -> list[str]:
    """Returns `words` with each abbreviation of a torchrun option written out: argparse takes `--redirect=3` there.

    Only before the script, only where one option alone begins so, and not for our own options. What is no option stays
    as it is, for click to refuse. An option whose value may be left out gets the one that it then has. Pure.
    """
    known = {flag: row for row in rows for flag in row.flags}
    found = list(words)
    at = 0
    while at < len(found) and found[at].startswith("-") and found[at] not in ("-", "--"):
        name, equals, value = found[at].partition("=")
        flag = name.replace("_", "-")
        if flag not in known and flag.startswith("--"):
            near = [row.flag for row in known.values() if row.flag.startswith(flag) and not row.own]
            if len(set(near)) == 1:
                flag = near[0]
                found[at] = flag + equals + value
        row = known.get(flag)
        if row is not None and row.bare_value:
            # the word behind it may be the script
            found[at] = found[at] if equals else f"{flag}={row.bare_value}"
            at += 1
            continue
        at += 2 if row is not None and not row.is_switch and not equals else 1
    return found


class GroupedCommand(click.Command):
    """A command whose --help lists its options under their groups."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rows = [p.row for p in self.get_params(ctx) if isinstance(p, OptionOf)]
        return super().parse_args(ctx, args if ctx.resilient_parsing else whole_flags(args, rows))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_options(ctx, formatter, self.get_params(ctx))


def _write_options(
    ctx: click.Context, formatter: click.HelpFormatter, parameters: Iterable[click.Parameter]
) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None and isinstance(parameter, click.Option):
            title = parameter.row.group if isinstance(parameter, OptionOf) else "Other"
            groups.setdefault(title, []).append(record)
    for title, rows in groups.items():
        with formatter.section(title):
            # padded, so that the descriptions of all groups stand in one column
            padded = [(left.ljust(_LEFT_COLUMN), right) for left, right in rows]
            formatter.write_dl(padded, col_max=_LEFT_COLUMN)


class DefaultRunGroup(click.Group):
    """A group that takes a first word that is no command for the start of `run`'s arguments."""

    default_command = "run"
    hints: Mapping[str, str] | None = None  # by option of another program: what to use here

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and ctx.resilient_parsing:
            return super().parse_args(ctx, args)  # a shell asks how the first word may go on
        own = ("-h", "--help", "--version")
        if not args or (args[0] not in self.commands and args[0] not in own):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes the first word: a command, a script, or an option of `run`."""
        if incomplete.startswith("-"):
            run = self.commands[self.default_command]
            return run.shell_complete(
                click.Context(run, info_name=run.name, parent=ctx, **CONTEXT), incomplete
            )
        return [*super().shell_complete(ctx, incomplete), CompletionItem(incomplete, type="file")]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # not click's own: it would normalise underscores in the name
        return args[0], self.commands[args[0]], args[1:]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        run = self.commands[self.default_command]
        in_run = click.Context(run, info_name=run.name, parent=ctx, **CONTEXT)
        # self.params and not get_params: --help is among the options of `run`
        _write_options(in_run, formatter, [*run.get_params(in_run), *self.params])
        self.format_commands(ctx, formatter)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command as click's main does, but reports a mistake in one line and exits with the code it returns."""

        def go() -> Any:
            return super(DefaultRunGroup, self).main(
                args, prog_name, complete_var, standalone_mode=False, **extra
            )

        if standalone_mode:
            sys.exit(_reporting(go, self.hints))
        return go()


def _reporting(go: Callable[[], Any], hints: Mapping[str, str] | None = None) -> Any:
    """Returns the exit code of `go`, after a line for whatever it refused. Our own bugs keep their traceback.

    hints: what to say of options of other programs.
    """
    try:
        return go()
    except (UserError, PeerViolation, InfrastructureLost) as error:
        complain(str(error))
        return error.exit_code
    except click.NoSuchOption as error:
        hint = (hints or {}).get(error.option_name.replace("_", "-"))
        if hint is not None:
            complain(f"{error.option_name}: no such option here; {hint}")
            return UserError.exit_code
        flags = [] if error.ctx is None else _shown_flags(error.ctx)
        near = " or ".join(nearest(error.option_name.replace("_", "-"), flags)) or "--help to see them all"
        complain(f"{error.option_name}: no such option; use {near}")
    except click.ClickException as error:
        complain(f"{error.format_message().rstrip('.')}; use --help to see how")
    except click.Abort:
        return INTERRUPTED
    return UserError.exit_code


def _shown_flags(ctx: click.Context) -> list[str]:
    options = [p for p in ctx.command.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
    return [flag for option in options for flag in option.opts]


def program_argument() -> click.Argument:
    """Returns the argument for SCRIPT and what follows it, untouched."""

    def files(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]

    metavar = "SCRIPT [ARGUMENTS]..."
    return click.Argument(
        ["program"], nargs=-1, type=click.UNPROCESSED, metavar=metavar, shell_complete=files
    )


def completion_script(shell: WrittenValue, command: click.Command) -> str:
    """Returns the completion script for a shell. Raises RequestError for a shell that click has no completion for."""
    made_for = get_completion_class(shell.text)
    if made_for is None:
        raise refuse(shell, "no completion for this shell", "bash, zsh or fish")
    return made_for(command, {}, PROGRAM, f"_{PROGRAM.replace('-', '_').upper()}_COMPLETE").source()


def parameters(rows: Iterable[Option]) -> list[click.Parameter]:
    return [OptionOf(row) for row in rows]


def complain(text: str) -> None:
    """Prints a mistake as one line on stderr, whatever the text holds."""
    click.echo(f"{PROGRAM}: {plain_line(' '.join(text.split()))}", err=True)


def note(text: str) -> None:
    click.echo(f"{PROGRAM}: note: {plain_line(' '.join(text.split()))}", err=True)
