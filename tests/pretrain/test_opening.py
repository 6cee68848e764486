from megalowbit.pretrain.opening import opening, products_line
from megalowbit.process_group import ProcessIdentity


def test_what_products_ran_in_is_said_on_one_line():
    line = products_line({"output": {"fp8": 1200, "bf16": 2}, "grad_weight": {"bf16": 3}})
    assert line == "products  output 2 bf16 + 1,200 fp8, grad_weight 3 bf16"


def test_the_opening_names_folder_model_recipe_data_and_batch(build_job):
    job = build_job()
    text = opening(job, ProcessIdentity(), is_resumed=False, changes=["run.steps 5 -> 6"])
    first_words = [line.split()[0] for line in text.splitlines() if line]
    assert first_words == ["run", "model", "recipe", "kernels", "data", "batch", "changed"]
    parameters = sum(p.numel() for p in job.engine.module.parameters())
    assert f"{parameters:,} parameters" in text
    assert f"{2 * 2 * 32:,} tokens a step on 1 process" in text
    assert "resumed" not in text


def test_a_resumed_run_says_after_which_step(build_job):
    job = build_job()
    job.totals.steps = 17
    assert "resumed after step 17" in opening(job, ProcessIdentity(), is_resumed=True, changes=[])
