"""Losses on other data in printed lines: styles that people use, and lines that only look like them."""

import pytest

from gradrein.watch.record.curves.lines import TableReader, heading_of, read_line

STYLES = {
    "plain": ("epoch 3  train 0.4012  test 0.5123", [("test", 0.5123)]),
    "equals": ("epoch=3 train_loss=0.40 val_loss=0.51 val_acc=0.83", [("val loss", 0.51)]),
    "keras": ("12/12 - 1s 3ms/step - loss: 0.40 - accuracy: 0.9 - val_loss: 0.51 - val_accuracy: 0.8",
              [("val loss", 0.51)]),
    "words": ("Epoch 3/10, Train Loss: 0.4012, Val Loss: 0.5123, Val Acc: 83.20%", [("val loss", 0.5123)]),
    "mnist": ("Test set: Average loss: 0.0267, Accuracy: 9912/10000 (99%)", [("test loss", 0.0267)]),
    "tutorial": ("Test Error: \n Accuracy: 64.9%, Avg loss: 1.080", [("test loss", 1.080)]),
    "imagenet": ("Test: [ 10/100]\tTime  0.10 ( 0.12)\tLoss 1.2e+00 (1.3e+00)\tAcc@1  50.00 ( 51.00)",
                 [("test loss", 1.3)]),
    "nanogpt": ("step 500: train loss 1.5290, val loss 1.7011", [("val loss", 1.7011)]),
    "trainer": ("{'eval_loss': 0.3123, 'eval_accuracy': 0.91, 'eval_runtime': 1.2, 'epoch': 1.0}",
                [("eval loss", 0.3123)]),
    "json": ('{"epoch": 3, "train/loss": 0.4, "valid/loss": 0.51, "lr": 0.001}', [("valid loss", 0.51)]),
    "bars": ("| epoch   3 | time: 12.3s | valid loss  4.91 | valid ppl   135.6", [("valid loss", 4.91)]),
    "fairseq": ("epoch 001 | valid on 'valid' subset | loss 8.21 | nll_loss 7.1 | ppl 137.4",
                [("valid loss", 8.21), ("valid loss", 7.1)]),
    "logging": ("2026-01-05 10:33:21,123 INFO trainer: [epoch 4] dev loss = 0.7321", [("dev loss", 0.7321)]),
    "section": ("Validation: loss 0.3345, acc 0.90, time 3.2s", [("validation loss", 0.3345)]),
    "camel": ("trainLoss 0.4 valLoss 0.5", [("val loss", 0.5)]),
    "pair": ("loss (train/val): 0.4012 / 0.5123", [("val loss", 0.5123)]),
    "pair before": ("train/test loss: 0.40, 0.51", [("test loss", 0.51)]),
    "loss first": ("Loss: train 0.40, val 0.51", [("val loss", 0.51)]),
    "exponent": ("it 200 test_mse 3.1e-05", [("test mse", 3.1e-05)]),
    "negative": ("epoch 2 val nll: -1.234", [("val nll", -1.234)]),
    "nan": ("epoch 9 val_loss nan", [("val loss", None)]),
    "brackets": ("[Eval] step 100 loss 0.221", [("eval loss", 0.221)]),
    "arrow": ("Epoch 07 >> val loss: 0.4410 (best 0.3902 at epoch 5)", [("val loss", 0.4410)]),
    "after epoch": ("Validation loss after epoch 3: 0.4431", [("validation loss", 0.4431)]),
    "colour": ("\x1b[32mval loss\x1b[0m: 0.25", [("val loss", 0.25)]),
    "bar": ("Validation: 100%|####| 20/20 [00:03<00:00,  5.90it/s, loss=0.345]", [("validation loss", 0.345)]),
    "phase": ("val Loss: 0.2103 Acc: 0.9346", [("val loss", 0.2103)]),
    "integer": ("val loss: 3", [("val loss", 3.0)]),
    "underscores": ("epoch_3_val_loss: 0.5", [("val loss", 0.5)]),
    "lightning": ("Epoch 3: 100%|##| 40/40 [00:01<00:00, 30.1it/s, v_num=0, val_loss=0.52, train_loss=0.40]",
                  [("val loss", 0.52)]),
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
