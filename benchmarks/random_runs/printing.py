"""How a script prints: 94 ways, of which some print no test loss, and some nothing."""

from __future__ import annotations

_HEAD = {22: "epoch      train_loss   valid_loss   time\n", 38: "| step | loss | eval loss |\n|---|---|---|\n"}

# e: epoch, n: epochs, a: train loss, b: test loss, c and d: accuracies
_LINES = (
    "epoch {e}: train loss {a:.4f}, test loss {b:.4f}\n",
    "Epoch [{e}/{n}], Loss: {a:.4f}, Val Loss: {b:.4f}\n",
    "Epoch: {e:02} | Train Loss: {a:.3f} | Val. Loss: {b:.3f}\n",
    "train {a:.3g} test {b:.3g}\n",
    "{e} {a:.5f} {b:.5f}\n",
    "step {e}: train loss {a:.4f}, val loss {b:.4f}\n",
    "Train Epoch: {e} [640/60000 (1%)]\tLoss: {a:.6f}\n",
    "\nTest set: Average loss: {b:.4f}, Accuracy: 712/1000 (71%)\n\n",
    "{{'loss': {a:.4f}, 'eval_loss': {b:.4f}, 'epoch': {e}}}\n",
    "Epoch {e} done in 2.1s, train_loss={a:.4g}, val_loss={b:.4g}\n",
    "tr {a:.1e} te {b:.1e}\n",
    "[{e:3d}] loss {a:.4f} (eval {b:.4f})\n",
    "\rEpoch {e}/{n}: 100%|####| 12/12 [00:01<00:00, 9.31it/s, loss={a:.3f}, val_loss={b:.3f}]",
    "{e}/{n} - loss: {a:.4f} - val_loss: {b:.4f}\n",
    "Epoch {e}\n-------------------\nloss: {a:>7f}  [ 6400/60000]\nTest Error: \n Avg loss: {b:>8f} \n\n",
    "INFO:root:epoch={e} train/loss={a:.5f} valid/loss={b:.5f} lr=0.001\n",
    "Iter {e}: train {a:.4f} | test {b:.4f}\n",
    "epoch {e} train {a:.2f} test {b:.2f}\n",
    "Epoch {e}, training loss: {a}, validation loss: {b}\n",
    "iteration {e} loss {a:.4f}\n",
    "[epoch {e}] train_mse: {a:.4f} test_mse: {b:.4f}\n",
    "loss (train/test): {a:.4f} / {b:.4f}\n",
    "{e:<10d} {a:<12.6f} {b:<12.6f} 00:01\n",
    "",
    # Those of held-out tasks
    "({e}) Training: {a:.4f} -- Validation: {b:.4f}\n",
    "ep={e} tr_loss={a:.3e} te_loss={b:.3e}\n",
    "Epoch {e:>3} | train: {a:8.4f} | dev: {b:8.4f} | 3.2 sec\n",
    "[{e}/{n}] Train Loss {a:.4f}\n[{e}/{n}] Valid Loss {b:.4f}\n",
    "2024-05-01 10:00:07 - trainer - epoch {e} - loss {a:.4f} - test_loss {b:.4f}\n",
    "epoch={e}\ttrain={a:.4f}\tval={b:.4f}\n",
    '{{"epoch": {e}, "train_loss": {a:.6f}, "test_loss": {b:.6f}}}\n',
    "Train loss at epoch {e}: {a:.4f}\nTest loss at epoch {e}: {b:.4f}\n",
    "=> epoch {e} validation: loss {b:.4f}\n",
    "train_loss: {a:.4f} \t eval_loss: {b:.4f} \t ppl: 2.00\n",
    "\r{e}it [00:04, 41.2it/s, train={a:.3f}, test={b:.3f}]",
    "epoch {e}, {a:.5f}, {b:.5f}\n",
    "Epoch {e} loss: {a:.3f}\n",
    "Evaluation at step {e}: test cost = {b:.4f} (train cost = {a:.4f})\n",
    "| {e} | {a:.4f} | {b:.4f} |\n",
    "",
    # Those of wider tasks
    "Epoch {e:4d}  loss {a:.4e}  vloss {b:.4e}\n",
    "--- epoch {e} ---\n  train loss : {a:.4f}\n  val loss   : {b:.4f}\n",
    "[Epoch {e:03d}/{n:03d}] (train) loss={a:.5f} acc=0.71 (valid) loss={b:.5f} acc=0.70\n",
    "Training loss {a:.3f}\nValidation loss {b:.3f}\n",
    "step={e} loss/train={a:.4f} loss/val={b:.4f} tok/s=1031\n",
    "epoch: {e}, train_loss: {a:.3f}, test_loss: {b:.3f}, test_acc: 0.61\n",
    "{e:6d} | tr: {a:9.4f} | va: {b:9.4f}\n",
    "loss: {a:.5f} val_loss: {b:.5f} lr: 1.0e-03\n",
    "Epoch {e} training took 0.51s, mean loss {a:.4f}\n",
    "{{'epoch': {e}, 'train': {{'loss': {a:.4f}}}, 'test': {{'loss': {b:.4f}}}}}\n",
    "Epoch {e}/{n}\n12/12 [==============================] - 1s - loss: {a:.4f} - val_loss: {b:.4f}\n",
    "eval/loss {b:.5f} train/loss {a:.5f} at {e}\n",
    "Loss on train: {a:.4f}. Loss on test: {b:.4f}.\n",
    "",
    # Those of unseen tasks
    "{e}: train={a:.4f}, holdout={b:.4f}\n",
    "Epoch {e} | Train Loss: {a:.5f}, Train Acc: 0.81 | Test Loss: {b:.5f}, Test Acc: 0.77\n",
    "iter {e}/{n} train_loss {a:.4f} val_loss {b:.4f} time 12ms\n",
    "[TRAIN] epoch {e} loss {a:.4f}\n[VALID] epoch {e} loss {b:.4f}\n",
    "  Average training loss: {a:.2f}\n  Validation Loss: {b:.2f}\n",
    "ep {e} | trn {a:.3f} | tst {b:.3f}\n",
    "t={e} L_train={a:.4g} L_test={b:.4g}\n",
    "epoch {e}  train: loss={a:.4f}  eval: loss={b:.4f}\n",
    "Epoch {e}: loss={a:.4f}\n",
    "{e},{a:.6f},{b:.6f}\n",
    "train mse {a:.4f} || test mse {b:.4f}\n",
    "Finished epoch {e}. Training error {a:.4f}, test error {b:.4f}\n",
    "\r{e}/{n} train_loss {a:.3f} dev_loss {b:.3f}",
    "",
    # Those of tasks of the last list: as in 26 public training loops, none of which the reader was built on
    "[Epoch {e}] Train: {a:.4f}, Val: {b:.4f}, LR: 1.00e-03\n",
    "[Epoch {e}] train/loss={a:.4f} train/acc={c:.4f} val/loss={b:.4f} val/acc={d:.4f}\n",
    "—> Epoch {e} TRAIN   loss: {a:.4f} | char_acc: {c:.3f}\n—> Epoch {e} VAL     loss: {b:.4f} | char_acc: {d:.3f}\n",
    "Epoch {e}/{n}\n  train loss={a:.4f} acc={c:.4f}\n  val   loss={b:.4f} acc={d:.4f}\n",
    "Epoch {e:3d}/{n}  trn_loss={a:.5f}  val_mse={b:.5f}  val_mae={d:.4f}  lr=1.00e-03  (3.1s) *\n",
    "[STEP {e:04d}] train_loss={a:.4f} train_acc={c:.4f} val_loss={b:.4f} val_acc={d:.4f} "
    "(best_val_acc=0.8100 @ step=4)\n",
    "current epoch is {e}\ntraining loss(RMSE): {a}\nvalidation loss(RMSE): {b}\ntime: 2.13\n\n",
    "Epoch {e:03d} | Train Main: {a:.4f} | Val Main: {b:.4f} | LR(s): 2.00e-05, 2.00e-04\n",
    "Current Time: 18-12-03 | Epoch: {e:03d} | Train_Loss: {a:.4f} | Train_MAPE: {c:.4f} | Valid_Loss: {b:.4f} | "
    "Valid_MAPE: {d:.4f} | LR: 0.001000\n",
    "train loss: tensor({a:.4f}, grad_fn=<MeanBackward0>) eval loss: tensor({b:.4f})\n",
    "{e:>12}   train loss:  {a:>12.10f}\n{e:>12}    eval loss:  {b:>12.10f}\n",
    "Epoch {e}: Train Loss={a:.18f}Val Loss={b:.18f}\n",
    "[Seg] E{e} | trn_loss={a:.4f} pix={c:.4f} | val_loss={b:.4f} pix={d:.4f} dice={d:.4f}\n",
    "Train MSE:{a} | MAE: {c}\nValid MSE:{b} | MAE: {d}\n",
    "Epoch {e}/{n} | Train Loss {a:.4f} Acc {c:.2%} | Val Loss {b:.4f} Acc {d:.2%}\n",
    "epoch {e}, loss {a}, dev loss {b}, completed @ 12:03:11\n",
    "-*--*--*-\n[FOLD 0 EPOCH {e}/{n}]\n    train_loss: {a:.4f}\n    train_accuracy: {c:.4f}\n    valid_loss: {b:.4f}\n"
    "    valid_accuracy: {d:.4f}\n-*--*--*-\n",
    "Epoch = {e:2d}: Cumulative Time = 1.310, Epoch Time = 0.412, Images/sec = 412.1, Validation Loss = {b:5.3f}, "
    "Validation Accuracy = {d:5.3f}\n",
    "[plain] step {e:5d}: train loss {a:.3f}, dev loss {b:.3f}\n",
    "[Epoch {e} 12/12] train - loss: {a:.4f}\n[Epoch {e}] val - loss: {b:.4f}\n",
    "\rEpochs:  30%|###       | {e}/{n} [00:01<00:02,  3.10epoch/s, train={a:.4f}, val={b:.4f}, lr=1.0e-03]",
    "EPOCH {e} ...\nValidation loss = {b}\nValidation accuracy = {d}\n\n",
    "Epoch {e} completed. Average Loss: {a:.4f}\n",
    "Epoch {e}/{n}, Loss: {a:.4f} Validation - Accuracy: {d:.4f}, Precision: {d:.4f}, F1: {c:.4f}\n",
    "{e}\t{a}\t{b}\t{d}\n",
    "",
)
NO_TEST_LOSS = (6, 19, 23, 36, 39, 48, 53, 62, 67, 90, 91, 93)  # scripts that do not compute one
UNNAMED = (4, 35, 63, 92)  # scripts that print it without a name


def printed(style: int, epoch: int, epochs: int, train: float, test: float) -> str:
    """Return what a script of a style prints at the end of an epoch, counted from 1."""
    right = {"c": 0.95 - 0.6 * 0.9**epoch, "d": 0.85 - 0.5 * 0.9**epoch}
    line = _LINES[style].format(e=epoch, n=epochs, a=train, b=test, **right)
    return (_HEAD.get(style, "") if epoch == 1 else "") + line
