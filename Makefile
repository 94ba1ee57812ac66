# `make demo` and `make test` do everything that is needed, every time; see README.md.
SHELL := /bin/bash
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup demo test test-all lint format bench clean
help:           ## this list
	@sed -n 's/^\([a-z-]*\): .*## /\1\t/p' Makefile | expand -t 12

setup:          ## packages, virtual environment, Rust programs
	@tools/setup.sh

demo: setup     ## start a server, run the demo with the official E2B SDK, stop it again
	@python tools/demo.py

test: setup     ## the tests: Rust and Python, real VMs, real SDKs
	@tools/test.sh

test-all: setup ## the tests and the slow matrix
	@tools/test.sh --all

lint: setup     ## everything that can be checked without running
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings

format:         ## rewrite sources in the one style
	ruff check --fix .
	ruff format .
	cargo fmt

bench: setup    ## the benchmarks
	python benchmarks/sandboxes.py
	python benchmarks/network_slots.py
	cargo run --release --locked --quiet -p aenv-edge --example load

clean:          ## remove what was built here; homes and caches of nodes stay
	rm -rf target .venv .cache src/aenv/_bin
