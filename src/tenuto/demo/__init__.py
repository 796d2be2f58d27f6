"""`tenuto demo`: kills a real training job repeatedly and compares it bit for bit with an undisturbed one."""
