"""Video processor of the video models."""

from ..plain import processor_code
from ..plain.video_processing import LieREVideoProcessor as PlainVideoProcessor
from ..storage.saved_code import SavesItsCode


class LieREVideoProcessor(SavesItsCode, PlainVideoProcessor):
    __doc__ = PlainVideoProcessor.__doc__

    code_file = "video_processing_liere"
    settings_file = "video_preprocessor_config.json"

    def plain_code(self) -> dict[str, str]:
        return {"video_processing_liere.py": processor_code()}
