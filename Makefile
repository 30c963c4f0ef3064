# MilpaFS. `make demo` runs the main job, `make test` passes the tests; both install what they need.

CARGO ?= cargo
PREFIX ?= /usr/local
PACKAGES := gcc make git libc6-dev

.PHONY: all sim sim-short sim-crash sim-soak bug-bank fuzz hostile crash power power-must-lose soak bench bench-million bench-directory bench-recovery bench-failover demo test build release packages format lint docs licences unit e2e test-flush-fault install clean help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

all: build

packages:
	@scripts/packages $(PACKAGES)

build: packages ## the program, for development
	$(CARGO) build --workspace

release: packages ## the program, optimized
	$(CARGO) build --release -p milpa-cli -p milpa-testbed -p milpa-bench

demo: release ## a cluster on this machine, mounted, doing real work, cleaned up
	target/release/milpa-demo

test: packages format lint docs licences unit sim-short e2e ## everything that must hold before a change lands

format: ## is the code formatted?
	$(CARGO) fmt --all --check

lint: ## clippy, warnings are errors
	$(CARGO) clippy --workspace --all-targets -- -D warnings

docs: ## the documentation builds without a warning
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --quiet

licences: ## every dependency has a licence that we may ship
	scripts/licences

unit: ## tests of each crate
	$(CARGO) test --workspace --exclude milpa-testbed

SIM := $(CARGO) run --quiet --profile sim -p milpa-sim --

sim-short: packages ## a few seeds of the simulated cluster, each run twice, and some crash points
	$(SIM) --seeds 0..4 --operations 500 --twice
	$(SIM) --seeds 3..4 --operations 30 --jobs 2 --crash-points 41

sim: packages ## the whole cluster simulated under faults: some minutes of seeds
	$(SIM) --seeds 0..40 --jobs 2 --keep-going

sim-crash: packages ## a crash, and a pause, at every point of some short courses (SEEDS=0..4; each takes a quarter of an hour)
	$(SIM) --seeds $${SEEDS:-0..4} --operations 30 --jobs 2 --crash-points

sim-soak: packages ## simulate for HOURS hours; goes on where the last soak ended (target/sim-tally.json)
	$(SIM) --tally target/sim-tally.json --hours $${HOURS:-1} --jobs 2 --keep-going

bug-bank: packages ## known bugs, put back one at a time: the simulation must find each (SEEDS=500)
	@scripts/packages patch
	CARGO="$(CARGO)" scripts/bug-bank

fuzz: packages ## hostile bytes for every decoder, ten minutes for each family (FUZZ_SECONDS)
	RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/scripts/fuzz-rustc $(CARGO) run --quiet -p milpa-fuzz -- --seconds $${FUZZ_SECONDS:-600}

hostile: build ## hostile bytes to every port of a live cluster, for ten minutes (MILPA_HOSTILE_SECONDS)
	MILPA_HOSTILE_SECONDS=$${MILPA_HOSTILE_SECONDS:-600} $(CARGO) test -p milpa-testbed --test e2e -- --test-threads=1 --nocapture hostile

e2e: build ## tests on real mounts with real processes
	@scripts/packages strace iproute2
	$(CARGO) test -p milpa-testbed -- --test-threads=1

crash: build ## kill everything at once under load, 20 times (MILPA_CRASH_ROUNDS)
	MILPA_CRASH_ROUNDS=$${MILPA_CRASH_ROUNDS:-20} $(CARGO) test -p milpa-testbed -- --test-threads=1 --nocapture everything_is_killed

power: build ## cut the power of nodes under load, 100 times (MILPA_POWER_CUTS, MILPA_POWER_SEED)
	$(CARGO) test -p milpa-testbed --test e2e -- --test-threads=1 --nocapture --include-ignored power::power_cuts power::a_power_cut

soak: build ## two clients under faults of all kinds, for half an hour (MILPA_SOAK_MINUTES, MILPA_SOAK_SEED)
	@scripts/packages iproute2
	$(CARGO) test -p milpa-testbed --test e2e -- --test-threads=1 --nocapture --include-ignored soak::a_cluster_under_faults

power-must-lose: build ## the same where it must lose: durability = memory, and disks that lie about syncs
	$(CARGO) test -p milpa-testbed --test e2e -- --test-threads=1 --nocapture --include-ignored power::must_lose

test-flush-fault: build ## builds that skip flushes must fail the test that looks for them
	@scripts/packages strace
	CARGO="$(CARGO)" scripts/test-flush-fault

bench: release ## mdtest's phases and fio's patterns beside plain ext4
	target/release/milpa-bench compare

bench-million: release ## a million inodes: memory for each, restart of each meta node
	target/release/milpa-bench million

bench-directory: release ## 100,000 files in one directory: ls and the mount's memory
	target/release/milpa-bench directory

bench-recovery: release ## a data node lost that holds FILES files (50000): files/s until redundant again
	target/release/milpa-bench recovery --files $${FILES:-50000}

bench-failover: release ## servers killed under load: the longest call that a client sees
	target/release/milpa-bench failover

install: release ## milpa and mount.milpa
	install -D -m 755 target/release/milpa $(DESTDIR)$(PREFIX)/bin/milpa
	mkdir -p $(DESTDIR)/sbin
	ln -sf $(PREFIX)/bin/milpa $(DESTDIR)/sbin/mount.milpa

clean: ## remove what was built
	$(CARGO) clean
