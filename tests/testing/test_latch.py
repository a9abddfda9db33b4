"""The latch device: work is done when the test says so, and in the order that it says."""

from asynctrt.testing import LatchDevice


def launch(device, done, name):
    stream = device.create_stream()
    stream.launch(lambda: done.append(name), label="note")
    return stream


def test_work_is_held_until_it_is_released():
    device, done = LatchDevice(), []
    for name in "abc":
        launch(device, done, name)
    assert (device.held, done) == (3, [])
    device.release()
    assert (device.held, done) == (2, ["a"])
    device.release(last=True)
    assert done == ["a", "c"]
    assert repr(device) == "<LatchDevice closed held=1>"


def test_open_lets_everything_pass_and_shut_holds_again():
    device, done = LatchDevice(), []
    launch(device, done, "held")
    device.open()
    launch(device, done, "passes")
    assert done == ["held", "passes"]
    device.shut()
    launch(device, done, "held again")
    assert len(done) == 2
