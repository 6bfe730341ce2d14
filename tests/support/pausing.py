"""Source text of workers that do nothing until a signal ends them."""

# signal.pause() would not run the handler of a signal that came just before the call.
PAUSE = """
def pause():
    import os, signal
    awake, signals = os.pipe()
    os.set_blocking(signals, False)
    signal.set_wakeup_fd(signals)
    while True:
        os.read(awake, 1)
"""
