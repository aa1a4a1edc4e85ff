/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * What count.c uses of the emulator's plugin interface, version 1. Debian has
 * no package with its header.
 */
#ifndef COUNT_H
#define COUNT_H

#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum { OP_ADD_U64 };
enum { CB_NO_REGS };

typedef void (*trans_cb)(unsigned long long id, struct qemu_plugin_tb *tb);
typedef void (*exec_cb)(unsigned int cpu, void *data);

void qemu_plugin_register_vcpu_tb_trans_cb(unsigned long long id, trans_cb cb);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *tb, int op, void *to,
					      unsigned long long count);
void qemu_plugin_register_vcpu_insn_exec_inline(struct qemu_plugin_insn *insn, int op, void *to,
						unsigned long long count);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *insn, exec_cb cb, int flags,
					    void *data);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
unsigned long long qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *insn);

#endif
