"""`penstock completion`: the script that lets a shell complete these commands."""

from __future__ import annotations

import click

from penstock.cli import output
from penstock.cli.invocation import Invocation, leaf

SHELLS = ("bash", "zsh", "fish")


@leaf("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_obj
def command(invocation: Invocation, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash   penstock completion bash > ~/.local/share/bash-completion/completions/penstock
    zsh    penstock completion zsh > a folder of your $fpath, as _penstock
    fish   penstock completion fish > ~/.config/fish/completions/penstock.fish
    """
    from click.shell_completion import get_completion_class

    from penstock.cli.app import COMPLETION_VARIABLE, PROGRAM, root

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells it was asked about"
    script = kind(root, {}, PROGRAM, COMPLETION_VARIABLE).source()
    if invocation.json:
        output.print_json({"shell": shell, "script": script})
    else:
        output.print_text(script)
