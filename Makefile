# Needs GNU make >= 4.3 (grouped targets). macOS ships 3.81: install a newer one and call it `gmake`.
ifeq ($(filter grouped-target,$(.FEATURES)),)
$(error GNU make >= 4.3 is needed, this is $(MAKE_VERSION); try gmake, or conda install make)
endif
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules --warn-undefined-variables
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
NOTEBOOKS := 01_extract 02_private_steer 03_eval 04_ablations 05_mia
.PHONY: help figures test smoke nbval lint lock data calibrate bench peers clean FORCE $(NOTEBOOKS)

PROFILE ?= laptop
SEED    ?= 0
OUT     ?= $(if $(filter smoke,$(PROFILE)),build/smoke,.)
export PSA_OUT := $(abspath $(OUT))
R := $(OUT)/results/$(PROFILE)
F := $(OUT)/figures/$(PROFILE)
T := $(OUT)/tables/$(PROFILE)
figure = $(foreach s,png pdf csv json,$F/$(1).$(s))
table  = $(foreach s,csv md tex json,$T/$(1).$(s))

# An activated environment that satisfies the lock is used as it is; else .venv is built from the lock.
ACTIVE := $(shell python psa_utils/lockcheck.py requirements.lock >/dev/null 2>&1 && command -v python)
VENV   := .venv/complete
PYTHON := $(or $(ACTIVE),$(abspath .venv/bin/python))
ENV    := $(if $(ACTIVE),,$(VENV))

help:             ## this list
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12
	@printf 'notebooks   $(NOTEBOOKS), each also a target\nvariables   PROFILE=$(PROFILE) SEED=$(SEED)\n'

A_02 := $(call table,table2_privacy) $(call figure,fig2_geometry)
A_03 := $(foreach f,fig3_alignment fig4_scaling,$(call figure,$f)) $(foreach t,table20_negative table_comparisons \
  table_recipes table5_mmlu table3_open_ended table21_negative_open_ended table4_examples,$(call table,$t))
A_04 := $(foreach f,fig5_noise fig5_clip fig_strength fig_estimators,$(call figure,$f)) \
  $(foreach t,table17_noise table18_clip table19_clip_noiseless table_layers table_estimators,$(call table,$t))
A_05 := $(call table,table7_mia) $(call figure,fig6_tradeoff) $(call figure,fig_canaries)
figures: $(R)/01_extract/manifest.json $(A_02) $(A_03) $(A_04) $(A_05)  ## every figure and table of PROFILE (default: laptop)

test: $(ENV) smoke peers  ## lint, unit tests, doctests, README, notebooks (papermill and nbval on the smoke profile)
	$(PYTHON) -m pytest -q
	+@$(MAKE) --no-print-directory nbval
smoke:            ## every notebook in two minutes on a tiny random model, into build/smoke
	+@$(MAKE) --no-print-directory figures PROFILE=smoke
nbval: smoke      ## each notebook executes cell by cell from the smoke results
	PSA_PROFILE=smoke PSA_OUT=$(abspath build/smoke) $(PYTHON) -m pytest -q -x -p no:cacheprovider \
	  --nbval-lax --nbval-current-env --nbval-cell-timeout=300 notebooks
lint: $(ENV)      ## ruff, code and notebooks
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
data: $(ENV)      ## download the CAA benchmark (pinned, SHA-256 checked) into the cache folder
	$(PYTHON) -m psa_utils.download
calibrate: $(ENV) ## choose layers and multiplier on public pairs again (ten minutes), into tables/PROFILE
	$(PYTHON) -m psa_utils.calibrate --profile $(PROFILE)
bench: peers      ## speed against the published way of working (needs CAA; a quarter of an hour on an idle machine)
	PYTHONPATH=build/peers $(PYTHON) -m tests.benchmarks.bench_engines --json build/bench_engines.json
peers: $(ENV)     ## other libraries that tests and bench compare with, without their dependencies, into build/peers
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/peers \
	  steering-vectors==0.12.2 repeng==0.4.0 scikit-learn==1.9.1 joblib cloudpickle threadpoolctl narwhals
lock:             ## resolve pyproject.toml afresh into requirements.lock (torch stays: edit its line to move it)
	rm -rf build/lock && python3.11 -m venv build/lock && grep '^torch==' requirements.lock > build/lock/torch
	build/lock/bin/python -m pip install -q 'setuptools>=77' -r build/lock/torch
	build/lock/bin/python -m pip install -q '.[test]'
	build/lock/bin/python -m pip freeze --all --exclude pip --exclude psa-utils | sed 's/+cpu$$//' > build/lock/all
	mv build/lock/all requirements.lock
clean:            ## drop build/ and results/, keep figures/ and tables/
	rm -rf build results

$(VENV): requirements.lock pyproject.toml
	rm -rf .venv
	python3.11 -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# The digest of the code cells only: saving, executing or re-wording a notebook is not a change.
.SECONDARY: $(NOTEBOOKS:%=build/notebooks/%.sha256)
build/notebooks/%.sha256: notebooks/%.ipynb | $(ENV)
	@mkdir -p $(@D); $(PYTHON) -m psa_utils.notebooks $< > $@.new
	@cmp -s $@.new $@ && rm $@.new || mv $@.new $@

# The seed as a file, rewritten only when it changes.
$(R)/.seed: FORCE
	@mkdir -p $(@D); echo "$(SEED)" | cmp -s - $@ || echo "$(SEED)" > $@

# $(call notebook,NAME,UPSTREAM NOTEBOOKS,MODULES IT USES,FIGURES AND TABLES IT MUST WRITE)
COMMON := config paths seeding data models packing engine packaged store stages
define notebook
$(1): $(R)/$(1)/.done ## notebook
$(R)/$(1)/.done $(4) &: build/notebooks/$(1).sha256 psa_utils/profiles/$(PROFILE).toml $(R)/.seed \
    $(COMMON:%=psa_utils/%.py) $(3:%=psa_utils/%.py) $(2:%=$(R)/%/manifest.json) | $(ENV)
	$$(PYTHON) -m psa_utils.run $(1) --profile $$(PROFILE) --seed $$(SEED)
	@touch $(R)/$(1)/.done
$(R)/$(1)/manifest.json: $(R)/$(1)/.done ; @:
endef
$(eval $(call notebook,01_extract,,activations,))
$(eval $(call notebook,02_private_steer,01_extract,mechanism accounting vectors results plotting tables,$(A_02)))
REPORTING := steering evaluate scoring results stats vectors plotting sweep_plots tables
$(eval $(call notebook,03_eval,02_private_steer,$(REPORTING) reports knowledge generate open_ended judge endpoint embedding \
  quality scaling mechanism,$(A_03)))
$(eval $(call notebook,05_mia,01_extract,attacks attack_plots attack_tables audit bounds canaries games rowwise trials mechanism accounting \
  steering generate evaluate plotting tables,$(A_05)))
$(eval $(call notebook,04_ablations,01_extract,$(REPORTING) sweep_tables ablations calibrate mechanism accounting \
  estimation estimators rows finishing shrinkage public corpus planning,$(A_04)))
