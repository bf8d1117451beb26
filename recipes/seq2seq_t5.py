"""
An encoder-decoder model (T5, BART) learns to write the target of a text, on TPU, GPU and CPU.

    python recipes/seq2seq_t5.py --model_name_or_path google-t5/t5-small --dataset_name EdinburghNLP/xsum \
        --text_column document --target_column summary --prefix "summarize: " --output_dir runs/t5 \
        --per_device_train_batch_size 8 --learning_rate 3e-4 --bf16 --eval_strategy epoch --predict_with_generate

`--dataset_name` is one of the Hub or a directory with `train.jsonl` and `test.jsonl`. Everything else is a field of
`Seq2SeqTrainingArguments`, or of this package's configuration. Scored is how many predictions are the target, word by word.
"""

from dataclasses import dataclass

import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser

from hf_tpu_ext import TPUSeq2SeqTrainer, TPUSeq2SeqTrainingArguments


@dataclass
class ScriptArguments:
    """What is trained on what."""

    model_name_or_path: str
    dataset_name: str
    text_column: str = "text"
    target_column: str = "target"
    prefix: str = ""
    #: Tokens of a target at most. Those of a text at most: `max_length`.
    max_target_length: int = 64


def main() -> None:
    """Train, evaluate and save."""
    script, args = HfArgumentParser((ScriptArguments, TPUSeq2SeqTrainingArguments)).parse_args_into_dataclasses()
    args.max_length = args.max_length or 512
    args.generation_max_length = args.generation_max_length or script.max_target_length
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(script.model_name_or_path)

    def tokenize(rows):
        texts = [script.prefix + text for text in rows[script.text_column]]
        inputs = tokenizer(texts, max_length=args.max_length, truncation=True)
        targets = tokenizer(
            text_target=rows[script.target_column], max_length=script.max_target_length, truncation=True
        )
        return {**inputs, "labels": targets["input_ids"]}

    def share_equal(predictions):
        texts, targets = (
            tokenizer.batch_decode(np.where(ids < 0, tokenizer.pad_token_id, ids), skip_special_tokens=True)
            for ids in (predictions.predictions, predictions.label_ids)
        )
        equal = [text.split() == target.split() for text, target in zip(texts, targets, strict=True)]
        return {"equal": sum(equal) / len(equal)}

    data = load_dataset(script.dataset_name)
    data = data.map(tokenize, batched=True, remove_columns=data["train"].column_names)
    trainer = TPUSeq2SeqTrainer(
        model,
        args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model),
        processing_class=tokenizer,
        compute_metrics=share_equal if args.predict_with_generate else None,
    )
    trainer.train()
    trainer.save_model()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
