"""Losses on other data in printed lines: styles that people use, and lines that only look like them."""

import pytest

from gradrein.watch.record.curves.lines import TableReader, heading_of, read_line

STYLES = {
    "plain": ("epoch 3  train 0.4012  test 0.5123", [("test", 0.5123)]),
    "camel": ("trainLoss 0.4 valLoss 0.5", [("val loss", 0.5)]),
    "joined": ("epoch 3 trainloss 0.40 valloss 0.51", [("val loss", 0.51)]),
    "short": ("Epoch 3 loss 4.0e-01 vloss 5.1e-01", [("val loss", 0.51)]),
    "symbol": ("t=3 L_train=0.40 L_test=0.51", [("test loss", 0.51)]),
    "error": ("Training error 0.40, test error 0.51", [("test", 0.51)]),
    "pair": ("loss (train/val): 0.4012 / 0.5123", [("val loss", 0.5123)]),
    "pair before": ("train/test loss: 0.40, 0.51", [("test loss", 0.51)]),
    "negative": ("epoch 2 val nll: -1.234", [("val nll", -1.234)]),
    "nan": ("epoch 9 val_loss nan", [("val loss", None)]),
    "brackets": ("[Eval] step 100 loss 0.221", [("eval loss", 0.221)]),
    "arrow": ("Epoch 07 >> val loss: 0.4410 (best 0.3902 at epoch 5)", [("val loss", 0.4410)]),
    "after epoch": ("Validation loss after epoch 3: 0.4431", [("validation loss", 0.4431)]),
    "colour": ("\x1b[32mval loss\x1b[0m: 0.25", [("val loss", 0.25)]),
    "bar": ("Validation: 100%|####| 20/20 [00:03<00:00,  5.90it/s, loss=0.345]", [("validation loss", 0.345)]),
    "integer": ("val loss: 3", [("val loss", 3.0)]),
    "underscores": ("epoch_3_val_loss: 0.5", [("val loss", 0.5)]),
}  # fmt: skip
TRAPS = [
    "val: 3 files",
    "test 12.5s",
    "Test accuracy: 0.9134",
    "val_acc=0.91 val_f1=0.88 val_auc=0.97",
    "Evaluating: 45%|####5     | 9/20 [00:03<00:04,  2.53it/s]",
    "test: 83.2%",
    "val loss improved from 0.52 to 0.43",
    "Validation loss decreased (0.52 --> 0.43).  Saving model ...",
    "best val loss 0.39",
    "loaded 1200 train, 300 val, 500 test images",
    "test lr 0.01",
    "eval time: 3.21",
    "eval took 3.2 seconds",
    "train loss 0.5",
    "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.291",
    "epoch 3 loss 0.4",
    "validation every 100 steps",
    "dev ppl 20.1",
    "/data/test/0.5/val.csv",
    "acc (train/test) 0.91/0.88",
    "test batch size 64",
    "values 0.3 0.4",
    "device: 0.5 GB",
    "{'eval_runtime': 1.2, 'eval_samples_per_second': 820.5}",
    "the latest loss is 0.3",
    "val loss std 0.03",
]


@pytest.mark.parametrize("style", STYLES)
def test_a_style_is_read(style):
    text, expected = STYLES[style]
    found, heading = [], None
    for line in text.split("\n"):
        found += read_line(line, heading)
        heading = heading_of(line)
    assert [(r.name.replace("nll loss", "loss"), r.value) for r in found] == [
        (name, pytest.approx(value, nan_ok=True) if value is not None else pytest.approx(float("nan"), nan_ok=True))
        for name, value in expected
    ]
    assert all(r.named == (" " in r.name) for r in found)


@pytest.mark.parametrize("line", TRAPS)
def test_a_trap_is_not(line):
    assert read_line(line) == []


def test_epochs_are_kept():
    assert read_line("epoch 12 val loss 0.4")[0].epoch == 12
    assert read_line("step 500: train loss 1.5290, val loss 1.7011")[0].epoch == 500


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("epoch  train_loss  valid_loss  accuracy  time", "0      0.401234    0.512300    0.8312    00:03"),
        ("| epoch | train loss | valid loss | acc | s |", "| 0 | 0.40 | 0.5123 | 0.8312 | 3 |"),
        ("epoch,train_loss,valid_loss,acc,s", "0,0.40,0.5123,0.83,3"),
        ("epoch train_loss valid_loss acc s", "0 0.40 0.5123 0.83 3"),
    ],
)
def test_tables_are_read(header, row):
    table = TableReader()
    assert table.read(header) == []
    assert [(r.name, r.value) for r in table.read(row)] == [("valid loss", pytest.approx(0.5123))]
    assert table.read("done in 3 s, all 5 columns written") == []


def test_rows_without_a_header_are_not():
    assert TableReader().read("0 0.40 0.51 0.83 3") == []
