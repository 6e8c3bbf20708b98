"""Camera branch: ray-relative positions on q, k, v, then the delta rule without a normaliser."""

from longtake.kernels.cam.reference import cam_bidirectional, cam_discount, cam_output, cam_prepare, cam_scan

__all__ = ["cam_bidirectional", "cam_discount", "cam_output", "cam_prepare", "cam_scan"]
