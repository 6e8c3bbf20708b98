"""Cameras: from what clients send (poses, actions, trajectory files, intrinsics) to the geometry the model reads.

Poses are camera-to-world in OpenCV axes (x right, y down, z forward), one a video frame, and intrinsics are
fx fy cx cy in pixels. Both stay in float64 until `rays` packs them for the model in fp32. Bad input raises
`ProblemError` with the field at fault.
"""
