"""A script for Hugging Face's Trainer, as its users write them.

    python train.py MODEL FOLDER [--resume]
    mpirun -np 2 python train.py MODEL FOLDER [--resume] [--tensor-parallel]

The environment says whether it runs under model parallelism (see test_hf_trainer.py), of which
it knows nothing else than where a model is created whose layers are to be split.
Writes ``FOLDER/result<rank>.pt``: losses, metrics, predictions and, on rank 0, the saved
model's parameters.
"""

import argparse
import os
from pathlib import Path

import torch
import transformers
from transformers import Trainer, TrainingArguments

WORDS = 40


class Sentences(torch.utils.data.Dataset):
    """Word numbers that follow from a rule, so that there is something to learn."""

    def __init__(self, count: int, classes: bool, seed: int):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(WORDS, (count, 1), generator=generator)
        step = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = (start + step * torch.arange(10)) % WORDS
        self.labels = start.squeeze(1) // 14 if classes else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def gpt2() -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=4,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(config)


MODELS = {"gpt2": gpt2, "bert": bert}


def created(model: str, tensor_parallel: bool) -> torch.nn.Module:
    if not tensor_parallel:
        return MODELS[model]()
    import smdistributed.modelparallel.torch as smp

    with smp.model_creation(tensor_parallelism=True):
        return MODELS[model]()


class InOrder(Trainer):
    """Steps see the same samples, however many ranks share them."""

    def _get_train_sampler(self) -> torch.utils.data.Sampler:
        return torch.utils.data.DistributedSampler(
            self.train_dataset, self.args.world_size, self.args.process_index, shuffle=False
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true", help="from the checkpoint half way")
    parser.add_argument("--tensor-parallel", action="store_true", help="split the layers")
    parser.add_argument("--in-order", action="store_true", help="do not shuffle")
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank in a step")
    parser.add_argument("--max-norm", type=float, default=1e6, help="of gradients")
    options = parser.parse_args()
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))
    arguments = TrainingArguments(
        str(options.folder),
        max_steps=12,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=8,
        learning_rate=5e-3,
        weight_decay=0.1,
        max_grad_norm=options.max_norm,
        logging_steps=1,
        save_steps=6,
        evaluation_strategy="steps",
        eval_steps=6,
        seed=3,
        no_cuda=True,
        report_to=[],
        disable_tqdm=True,
    )
    transformers.set_seed(arguments.seed)
    classes = options.model == "bert"
    trainer = (InOrder if options.in_order else Trainer)(
        created(options.model, options.tensor_parallel),
        arguments,
        train_dataset=Sentences(64, classes, seed=1),
        eval_dataset=Sentences(24, classes, seed=2),
    )
    checkpoint = options.folder / "checkpoint-6"
    trainer.train(resume_from_checkpoint=str(checkpoint) if options.resume else None)
    metrics = trainer.evaluate()
    predictions = trainer.predict(trainer.eval_dataset).predictions
    trainer.save_model()
    log = trainer.state.log_history
    wrapped = trainer.model_wrapped
    inner = wrapped.get_module() if hasattr(wrapped, "get_module") else wrapped
    result = {
        "wrapped": type(wrapped).__name__,
        "modules": {type(module).__name__ for module in inner.modules()},
        "steps": trainer.state.global_step,
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "eval_loss": metrics["eval_loss"],
        "predictions": torch.from_numpy(predictions),
    }
    if rank == 0:
        result["parameters"] = torch.load(options.folder / "pytorch_model.bin")
    torch.save(result, options.folder / f"result{rank}.pt")


if __name__ == "__main__":
    main()
