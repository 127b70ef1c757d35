"""Compares two checkpoints in the browser: predictions, probabilities and attention.

    python training/app.py                                             # the stored models and those of `make demo`
    python training/app.py --checkpoints outputs/cifar10 me/liere8     # folders, and models on the Hub
    python training/app.py --write_space outputs/space                 # a Space with the same page, to be pushed

Everything runs on this machine's CPU. Code in checkpoints is not executed, and the page contacts no other server.
"""

import argparse
import logging
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers.utils.logging import disable_progress_bar

from hf_liere.errors import InputError
from hf_liere.storage.client import HubError
from training.tasks.playground.page import CSS, App, build, theme
from training.tasks.playground.pictures import MAX_MEGABYTES
from training.tasks.playground.predictions import find_checkpoints


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoints",
        nargs="+",
        metavar="CHECKPOINT",
        help="folders with image classifiers, or folders of such folders, or names on the Hub (outputs/arrows)",
    )
    parser.add_argument("--server_name", help="address to listen at (GRADIO_SERVER_NAME, else 127.0.0.1)")
    parser.add_argument("--server_port", type=int, help="port (GRADIO_SERVER_PORT, else the first free one from 7860)")
    parser.add_argument(
        "--write_space", type=Path, metavar="DIR", help="write a Space with these checkpoints instead of serving them"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    disable_progress_bar()
    try:
        checkpoints = find_checkpoints(options.checkpoints)
        if options.write_space is not None:
            # Imported here because the module is not part of a Space.
            from training.tasks.playground.space import write_space

            print(write_space(options.write_space, checkpoints))
            return
        build(App(checkpoints)).launch(
            server_name=options.server_name,
            server_port=options.server_port,
            max_file_size=MAX_MEGABYTES * 2**20,
            theme=theme(),
            css=CSS,
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            share=False,
        )
    # gradio raises OSError where a port is taken.
    except (InputError, HubError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
