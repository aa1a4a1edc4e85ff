/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * What bindgen reads; bindings/parameters says what comes out.
 */

#include <linux/types.h>
#include <linux/errno.h>
#include <linux/if_link.h>
#include <linux/irq_work.h>
#include <linux/netdevice.h>
#include <linux/platform_device.h>
#include <linux/workqueue.h>
#include <rdma/ib_mad.h>
#include <rdma/ib_verbs.h>
#include <rdma/rdma_counter.h>

/* Macros that bindgen cannot evaluate. */
static const u32 RUST_CONST_HELPER_RDMA_CORE_PORT_IBA_IB = RDMA_CORE_PORT_IBA_IB;
static const u8 RUST_CONST_HELPER_RDMA_NODE_IB_CA = RDMA_NODE_IB_CA;
