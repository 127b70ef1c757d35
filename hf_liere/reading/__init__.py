"""
The one place that opens files of pictures, clips, volumes and tokens, for training, commands and the page. A library
decides wherever one knows: Pillow, PyAV, nibabel, pydicom, pyarrow.
"""
