// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * A plugin of QEMU's emulator that counts the guest kernel's instructions.
 *
 *   -plugin file=count.so,out=FILE
 *
 * Instructions of kernel modules are counted one by one, all others by the
 * translated block that they are in. When the guest executes
 *
 *   nopl 0x49504fNN(%rax)
 *
 * the counts so far are appended to FILE as a snapshot with the number NN: a
 * line "snapshot NN TOTAL", then lines "ADDRESS COUNT" for what was executed.
 *
 * One virtual CPU only.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "count.h"

EXPORT int qemu_plugin_version = 1;

#define KERNEL 0xffff800000000000ull
#define MODULES 0xffffffffa0000000ull
#define BUCKETS 65536

/* nopl disp32(%rax), the three upper bytes of the displacement. */
static const uint8_t mark_start[] = { 0x0f, 0x1f, 0x80 };
static const uint8_t mark_end[] = { 0x4f, 0x50, 0x49 };
#define MARK_LEN 7

struct counter {
	struct counter *next;
	unsigned long long address;
	unsigned long long count;
};

static struct counter *buckets[BUCKETS];
static unsigned long long total;
static FILE *out;

static struct counter *counter_of(unsigned long long address)
{
	struct counter **at = &buckets[(address ^ address >> 16) % BUCKETS];

	for (; *at; at = &(*at)->next) {
		if ((*at)->address == address)
			return *at;
	}
	*at = calloc(1, sizeof(**at));
	if (!*at)
		abort();
	(*at)->address = address;
	return *at;
}

static void marked(unsigned int cpu, void *data)
{
	(void)cpu;
	fprintf(out, "snapshot %u %llu\n", (unsigned int)(uintptr_t)data, total);
	for (unsigned int i = 0; i < BUCKETS; i++) {
		for (struct counter *c = buckets[i]; c; c = c->next) {
			if (c->count)
				fprintf(out, "%llx %llu\n", c->address, c->count);
		}
	}
	fflush(out);
}

static bool is_mark(const struct qemu_plugin_insn *insn)
{
	const uint8_t *bytes = qemu_plugin_insn_data(insn);

	return qemu_plugin_insn_size(insn) == MARK_LEN &&
	       !memcmp(bytes, mark_start, sizeof(mark_start)) &&
	       !memcmp(bytes + MARK_LEN - sizeof(mark_end), mark_end, sizeof(mark_end));
}

static void translated(unsigned long long id, struct qemu_plugin_tb *tb)
{
	size_t count = qemu_plugin_tb_n_insns(tb);
	unsigned long long start = qemu_plugin_insn_vaddr(qemu_plugin_tb_get_insn(tb, 0));

	(void)id;
	qemu_plugin_register_vcpu_tb_exec_inline(tb, OP_ADD_U64, &total, count);
	if (start >= KERNEL && start < MODULES) {
		qemu_plugin_register_vcpu_tb_exec_inline(tb, OP_ADD_U64,
							 &counter_of(start)->count, count);
		return;
	}
	for (size_t i = 0; i < count; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);

		if (start >= MODULES) {
			unsigned long long *to = &counter_of(qemu_plugin_insn_vaddr(insn))->count;

			qemu_plugin_register_vcpu_insn_exec_inline(insn, OP_ADD_U64, to, 1);
		} else if (is_mark(insn)) {
			const uint8_t *bytes = qemu_plugin_insn_data(insn);
			uintptr_t number = bytes[sizeof(mark_start)];

			qemu_plugin_register_vcpu_insn_exec_cb(insn, marked, CB_NO_REGS,
							       (void *)number);
		}
	}
}

EXPORT int qemu_plugin_install(unsigned long long id, const void *info, int argc, char **argv)
{
	(void)info;
	for (int i = 0; i < argc; i++) {
		if (!strncmp(argv[i], "out=", 4))
			out = fopen(argv[i] + 4, "w");
	}
	if (!out) {
		fprintf(stderr, "count: out=FILE is missing or cannot be written\n");
		return -1;
	}
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
