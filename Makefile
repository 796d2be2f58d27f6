# Everything runs from a virtual environment that `make setup` creates; nothing but Python 3.11+, git and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test test-more test-long test-stores test-trainers test-pages lint format reference docs bench bench-sizes bench-ranks bench-trainers crash-campaign kill-campaign kill-campaign-encoded kill-campaign-memory trainer-kills-campaign supervised-kills-campaign ranks-campaign nodes-campaign ranks-phases-campaign ranks-crash-campaign ranks-stateful-campaign layouts-campaign exact-resume-campaign resume-ranks-campaign corruption-campaign repair-campaign forgeries-campaign stateful-campaign retention-campaign fault-campaign fuzz signals-campaign mutation-run clean

# Bytecode is kept, whatever the environment says: hundreds of the tests' processes would compile the same again.
unexport PYTHONDONTWRITEBYTECODE

setup: $(STAMP)

# torch goes first and pinned: resolved after its dependents, pip pulls gigabytes of accelerator packages.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[torch,dev]'
	touch $@

demo: setup
	$(BIN)/tenuto demo

# One thread of torch's for each of many small processes. Six workers on two cores: much of the time a test waits for processes.
# A file is one worker's, which sets up its fixtures once; tests/conftest.py says which begin first.
test test-more test-long test-stores test-trainers test-pages: export OMP_NUM_THREADS = 1
# The tests' directories lie in memory where 4 GiB of that are free: each save is flushed, and what a disk makes of that few
# tests ask (they take theirs elsewhere), and `make test-long`.
test test-more: export PYTEST_DEBUG_TEMPROOT = $(shell test "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)" -ge 4194304 2>/dev/null && echo /dev/shm)

# In a new clone the test modules are compiled first, by two processes: each worker would do all of that for itself.
test: setup
	@test -d tests/unit/__pycache__ || { \
		$(BIN)/python -m pytest --collect-only tests/unit > /dev/null & \
		$(BIN)/python -m pytest --collect-only tests --ignore tests/unit > /dev/null; wait; }
	$(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(MORE))

# The rooms that most changes leave alone, so that `make test` is done in minutes: encodings, what interferes with what in
# upkeep, drills, predictors, jobs of several nodes, the code of the pages. Continuous integration runs both; so does plain
# `pytest`.
MORE = $(addprefix tests/,docs/test_code_blocks.py e2e/test_emergency_places.py e2e/test_risk.py e2e/test_run_nodes.py \
	e2e/test_sealed_emergency_places.py multiprocess/test_encoded_restarts.py multiprocess/test_gather.py \
	unit/cli/test_probe.py unit/codec/test_codecs.py unit/drill unit/encoding \
	unit/history/test_catalog_cache.py unit/maintenance/test_interleavings.py unit/maintenance/test_shared_packs.py \
	unit/supervisor/risk unit/training/test_tiers.py)
test-more: setup
	$(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder $(MORE)

# What takes long and is looked at from another side by `make test` too.
test-long: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --long

# Against real servers on loopback, which are installed below build/servers: Ceph, Azurite, rclone, moto and HDFS; three
# workers, since most of the time one waits for its servers. Where a
# machine cannot have one its tests are skipped by name, but with TENUTO_STORES_REQUIRED=1 or CI set they fail.
test-stores: setup
	$(BIN)/python tests/stores/install.py
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/stores

# In environments of their own below build/trainers: trainers do not agree on what they depend on. TRAINERS="torch jax" runs
# only these. One that this machine cannot have is skipped by name, but with TENUTO_TRAINERS_REQUIRED=1 it fails.
test-trainers: setup
	$(BIN)/python tests/trainers/install.py $(TRAINERS)
	$(BIN)/python tests/trainers/run.py $(TRAINERS)

# In a Chromium below build/browsers: playwright's own, else Debian's. Where a machine can have neither the tests are skipped
# by name, as in `make test` before this, but with TENUTO_PAGES_REQUIRED=1 they fail.
test-pages: setup
	PYTHONPATH=tests $(BIN)/python -m pages.install
	$(BIN)/python -m pytest tests/pages

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict --warn-unused-ignores tests/typing/public_surface.py tests/typing/wrong_use.py
	$(BIN)/pyright --pythonpath $(BIN)/python -p tests/typing
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: setup
	$(BIN)/python docs/generate_reference.py

# The site, in build/site: every link inside it is checked, also to a heading.
docs: setup
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# What follows takes minutes, wants a machine that does nothing else, and rewrites the committed results.
RESULTS := benchmarks/results

# About 75 minutes on two cores. P8 needs root, for a control group of its own, and says so where it has not.
bench: setup
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	$(BIN)/python benchmarks/p1_stall.py --gib 1
	$(BIN)/python benchmarks/p1_stall.py --gib 4 --rounds 7 --without-process
	$(BIN)/python benchmarks/p2_fenced.py --gib 1
	$(BIN)/python benchmarks/p3_overhead.py --gib 1 --rounds 12
	$(BIN)/python benchmarks/p3_everyday.py --gib 0.1
	$(BIN)/python benchmarks/p4_sync_save.py --gib 1
	$(BIN)/python benchmarks/p4_sync_save.py --gib 4
	$(BIN)/python benchmarks/p5_restore.py --gib 1 --cache hot
	$(BIN)/python benchmarks/p5_restore.py --gib 4 --cache hot --beside dcp
	$(BIN)/python benchmarks/p5_restore.py --gib 1 --cache cold --rounds 11
	$(BIN)/python benchmarks/p5_restore.py --gib 4 --cache cold --beside dcp
	$(BIN)/python benchmarks/p6_lazy.py
	$(BIN)/python benchmarks/p7_small.py --rounds 9
	$(BIN)/python benchmarks/p8_memory.py --gib 1
	$(BIN)/python benchmarks/p9_restart.py --gib 1
	$(BIN)/python benchmarks/recover.py
	$(BIN)/python benchmarks/p11_planning.py
	$(BIN)/python benchmarks/p12_codecs.py --rounds 15
	$(BIN)/python benchmarks/p13_space.py
	$(BIN)/python tests/stores/install.py
	$(BIN)/python benchmarks/p18_sealed_bucket.py
	$(BIN)/python benchmarks/p22_object_store.py
	$(BIN)/python benchmarks/stripe.py --places 4
	$(BIN)/python benchmarks/p17_one_off.py --gib 0.5
	$(BIN)/python benchmarks/convert.py --gib 0.5
	$(BIN)/python benchmarks/many_checkpoints.py
	$(BIN)/python benchmarks/p19_upkeep.py --gib 1 --rounds 5
	$(BIN)/python benchmarks/p20_history.py
	$(BIN)/python benchmarks/catalog.py
	$(BIN)/python benchmarks/p23_starting.py
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/plot.py

# In the environment of `make test-trainers TRAINERS=torch`: about ten minutes.
bench-trainers: setup
	$(BIN)/python tests/trainers/install.py torch
	build/trainers/torch/bin/python benchmarks/trainers.py --gib 0.2
	$(BIN)/python benchmarks/table.py

# The same at other sizes: some hours, since a block of `p3_everyday` is ten steps of a hundred copies each.
bench-sizes: setup
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	for script in p1_stall p2_fenced p3_overhead p8_memory p9_restart; do \
		$(BIN)/python benchmarks/$$script.py --gib 0.1 || exit 1; \
	done
	$(BIN)/python benchmarks/p2_fenced.py --gib 4 --rounds 11 --beside eager
	$(BIN)/python benchmarks/p3_overhead.py --gib 4 --rounds 7 --beside fenced
	$(BIN)/python benchmarks/p8_memory.py --gib 4
	$(BIN)/python benchmarks/p9_restart.py --gib 4 --rounds 7
	$(BIN)/python benchmarks/p3_everyday.py --gib 1 --beside eager fenced
	$(BIN)/python benchmarks/p3_everyday.py --gib 4 --beside eager --rounds 3
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/plot.py

# Jobs of two and four processes on this machine: about an hour.
bench-ranks: setup
	$(BIN)/python -m pip install --quiet -e '.[bench]'
	for ranks in 2 4; do for gib in 0.1 1; do \
		for what in stall fenced durable; do \
			$(BIN)/python benchmarks/ranks_save.py --what $$what --ranks $$ranks --gib $$gib || exit 1; \
		done; \
		$(BIN)/python benchmarks/ranks_compute.py --ranks $$ranks --gib $$gib || exit 1; \
		$(BIN)/python benchmarks/ranks_restore.py --ranks $$ranks --gib $$gib --cache hot || exit 1; \
		$(BIN)/python benchmarks/ranks_restore.py --ranks $$ranks --gib $$gib --cache cold || exit 1; \
	done; done
	for cache in hot cold; do \
		$(BIN)/python benchmarks/p10_reshard.py --savers 3 --ranks 2 --gib 1 --cache $$cache || exit 1; \
	done
	$(BIN)/python benchmarks/table.py
	$(BIN)/python benchmarks/plot.py

crash-campaign: setup
	$(BIN)/python -m campaigns.crash_states --states 100000 --seed 1 --json $(RESULTS)/r1_crash_states.json

kill-campaign: setup
	$(BIN)/python -m campaigns.kills --kills 1000 --seed 100 --json $(RESULTS)/r2_kills.json

# About ten minutes; leaves nothing in shared memory.
kill-campaign-encoded: setup
	$(BIN)/python -m campaigns.kills --kills 600 --encoding small dedupe auto --seed 700 --json $(RESULTS)/r2_kills_encoded.json
	$(BIN)/python -m campaigns.kills --memory --kills 400 --steps 120 --workers 2 --encoding small dedupe --seed 800 --json $(RESULTS)/r2_kills_memory_encoded.json

# About 15 minutes; leaves nothing in shared memory.
kill-campaign-memory: setup
	$(BIN)/python -m campaigns.kills --memory --kills 1000 --steps 120 --workers 2 --seed 300 --json $(RESULTS)/r2_kills_memory.json

# About half an hour on two cores: under `tenuto run`, which is killed now and then too. Leaves nothing in shared memory.
supervised-kills-campaign: setup
	$(BIN)/python -m campaigns.kills --supervised --kills 1000 --per-round 20 --steps 500 --workers 3 --seed 600 --json $(RESULTS)/r2_supervised.json

# About an hour on two cores, in the environments that `make test-trainers` installs.
trainer-kills-campaign: setup
	$(BIN)/python tests/trainers/install.py torch jax tensorflow
	$(BIN)/python -m campaigns.trainer_kills --json $(RESULTS)/trainer_kills.json

# About ten minutes on two cores: numbers, and trainings under torch (DDP, FSDP2), in equal parts.
ranks-campaign: setup
	$(BIN)/python -m campaigns.rank_kills --kills 200 --seed 1 --json $(RESULTS)/r5_ranks.json

# About four minutes on two cores: numbers, with packs on each node's own disk.
nodes-campaign: setup
	$(BIN)/python -m campaigns.rank_kills --training nodes --kills 150 --seed 1 --json $(RESULTS)/r5_nodes.json

# About twenty minutes on two cores: pairs of layouts over four processes and over simulated ranks, and bugs seeded.
layouts-campaign: setup
	$(BIN)/python -m campaigns.layouts --pairs 250 --simulated 280 --seed 1 --json $(RESULTS)/layouts.json

# About ten minutes and 12 GiB of memory; one core. Its times are of the processor.
scale-campaign: setup
	$(BIN)/python -m campaigns.many_ranks --json $(RESULTS)/many_ranks.json

# Every phase: a rank, the coordinator, a TCP store, a directory; and old jobs that come back. About ten minutes on two cores.
ranks-phases-campaign: setup
	$(BIN)/python -m campaigns.rank_phases --json $(RESULTS)/r5_phases.json
	$(BIN)/python -m campaigns.rank_phases.table

# Every scenario has its part of the states and of the twenty minutes; the seeded bugs come before, in some minutes.
ranks-crash-campaign: setup
	$(BIN)/python -m campaigns.rank_crashes --states 100000 --seconds 1200 --seed 1 --json $(RESULTS)/r1_ranks.json

repair-campaign: setup
	$(BIN)/python -m campaigns.corruption --repair --seconds 240 --cases 1000000 --seed 2 --json $(RESULTS)/repair.json

# Whoever writes to the store of a sealed repository without its key.
forgeries-campaign: setup
	$(BIN)/python -m campaigns.corruption --forge --seconds 240 --cases 1000000 --seed 1 --json $(RESULTS)/forgeries.json

ranks-stateful-campaign: setup
	$(BIN)/python -m campaigns.stateful --ranks --examples 100 --seed 1 --json $(RESULTS)/r_stateful_ranks.json

exact-resume-campaign: setup
	$(BIN)/python -m campaigns.exact_resume --json $(RESULTS)/r8_exact_resume.json

# About ten minutes.
resume-ranks-campaign: setup
	$(BIN)/python -m campaigns.resume_ranks --json $(RESULTS)/r8_ranks.json

fault-campaign: setup
	$(BIN)/python -m campaigns.faulty_disk --seed 1 --cases 0 --seconds 1500 --json $(RESULTS)/r4_faults.json

# Five minutes over all readers of bytes; the corpus that it begins with is tests/attacks.
fuzz: setup
	$(BIN)/python -m pip install --quiet -e '.[fuzz]'
	$(BIN)/python -m campaigns.fuzz --seconds 300 --json $(RESULTS)/r6_fuzz.json

retention-campaign: setup
	$(BIN)/python -m campaigns.retention_histories --histories 20000 --seed 1 --workers 2 --json $(RESULTS)/r7_retention.json

# All cases take hours: so many are drawn.
signals-campaign: setup
	$(BIN)/python -m campaigns.signals --cases 5000 --seed 1 --json $(RESULTS)/signals.json

corruption-campaign: setup
	$(BIN)/python -m campaigns.corruption --faults 1000000 --seed 1 --json $(RESULTS)/r3_corruption.json

stateful-campaign: setup
	$(BIN)/python -m campaigns.stateful --examples 400 --seed 1 --json $(RESULTS)/r_stateful.json

# A sample: all mutants take hours. Which survive and why is in the result.
mutation-run: setup
	$(BIN)/python tests/mutation/run.py --sample 600 --seed 1 --json $(RESULTS)/mutation.json

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
