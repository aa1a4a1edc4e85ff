// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Module parameters that the module! macro cannot declare: strings, and values
 * that can be read back in sysfs. Declarations only; ipoib_rs.rs checks and
 * publishes them.
 */

#include <linux/moduleparam.h>

int ipoib_rs_send_queue_size = 128;
module_param_named(send_queue_size, ipoib_rs_send_queue_size, int, 0444);
MODULE_PARM_DESC(send_queue_size, "Send ring entries per interface, a power of two in 128..8192 (default 128)");

int ipoib_rs_recv_queue_size = 256;
module_param_named(recv_queue_size, ipoib_rs_recv_queue_size, int, 0444);
MODULE_PARM_DESC(recv_queue_size, "Receive ring entries per interface, a power of two in 2..8192 (default 256)");

int ipoib_rs_max_connections = 4096;
module_param_named(max_connections, ipoib_rs_max_connections, int, 0444);
MODULE_PARM_DESC(max_connections, "Connections that peers may open to an interface, 0..65536 (default 4096)");

bool ipoib_rs_roce;
module_param_named(roce, ipoib_rs_roce, bool, 0444);
MODULE_PARM_DESC(roce, "Attach to RoCE ports too (default off)");

char *ipoib_rs_hcas = "";
module_param_named(hcas, ipoib_rs_hcas, charp, 0444);
MODULE_PARM_DESC(hcas, "Comma separated RDMA devices to attach to (default: all)");
