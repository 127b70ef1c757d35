"""The video processor of the video models, as it travels with checkpoints."""

from transformers import VideoMAEVideoProcessor
from transformers.video_utils import load_video


class LieREVideoProcessor(VideoMAEVideoProcessor):
    """
    VideoMAE's processor, frames → (B, T, C, H, W), which decodes files with PyAV: it contains ffmpeg, while the default
    decoder of transformers needs torchcodec and the system's ffmpeg.
    """

    def __init__(self, **kwargs):
        auto_map = {"AutoVideoProcessor": "video_processing_liere.LieREVideoProcessor"}
        super().__init__(**{"auto_map": auto_map, **kwargs})

    def fetch_videos(self, video_url_or_urls, sample_indices_fn=None):
        """Decode a file or address, or a list of them, into frames and metadata."""
        if isinstance(video_url_or_urls, list):
            return list(zip(*[self.fetch_videos(video, sample_indices_fn) for video in video_url_or_urls]))
        return load_video(video_url_or_urls, backend="pyav", sample_indices_fn=sample_indices_fn)
