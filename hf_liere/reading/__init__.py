"""
The one place that opens files of pictures, clips and volumes, for training, commands and the page. A library decides
wherever one knows: Pillow, PyAV, nibabel, pydicom.
"""
