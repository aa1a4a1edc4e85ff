# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
#
# The front door for people; the kernel build reads Kbuild. `make help` lists the targets.

KDIR ?= /lib/modules/$(shell uname -r)/build
override KDIR := $(abspath $(KDIR))
J ?= $(shell nproc)

module = flags=$$(tools/precheck $(KDIR)) && $(MAKE) -j$(J) -C $(KDIR) M=$(CURDIR) $$flags

all:
	@$(module) modules

install: all
	@$(module) modules_install

demo: setup
	@tools/demo

test: setup
	@tools/test

test-full: setup
	@tools/test --full

soak: setup
	@tools/test --soak $(or $(SOAK),30m)

kunit: setup
	@tools/test --only kunit kunit_fabric

bench: setup
	@tools/bench --write

shell: setup
	@tools/vm shell --topology rxe

check: setup
	@tools/check

doc: setup
	@tools/doc

setup:
	@tools/setup

clean:
	rm -rf build
	find . -name .git -prune -o \( -name '*.o' -o -name '*.ko' -o -name '*.mod' -o -name '*.mod.c' -o -name '*.bc' \
		-o -name '.*.cmd' -o -name '.*.d' -o -name 'bindings*_generated.rs' -o -name modules.order \
		-o -name Module.symvers -o -name .module-common.o \) -type f -exec rm -f {} +

help:
	@echo "ipoib_rs: IP over InfiniBand and RoCE, a Linux kernel module in Rust"
	@echo
	@echo "  make            build ipoib_rs.ko for the running kernel, or for KDIR=/path/to/kernel/build"
	@echo "  make install    build it and install it there"
	@echo
	@echo "With a kernel and a virtual machine of our own (Debian 12, root; all is installed and built on first use):"
	@echo "  make demo       two machines talk IP over Soft-RoCE: ping, iperf3, a summary"
	@echo "  make test       every test, about 40 minutes; the last line says how many passed and failed"
	@echo "  make test-full  the same with full loop counts, about 3 hours"
	@echo "  make soak       storms and churn for SOAK=30m"
	@echo "  make kunit      the KUnit suites only"
	@echo "  make bench      speed, beside that of the raw verbs; updates Documentation/performance.rst"
	@echo "  make shell      a shell in a virtual machine with the driver loaded"
	@echo "  make check      formatting, lints, house rules"
	@echo "  make doc        Documentation/ as HTML in build/doc"
	@echo "  make clean      remove what was built here (the kernels' cache stays)"

.PHONY: all install demo test test-full soak kunit bench shell check doc setup clean help
