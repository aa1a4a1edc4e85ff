/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/*
 * What bindgen reads. The allowlist in bindings/parameters decides what comes
 * out; headers that define enums come before those that only name them.
 */

#include <linux/types.h>
#include <linux/errno.h>
#include <linux/ethtool.h>
#include <linux/icmp.h>
#include <linux/icmpv6.h>
#include <linux/if_arp.h>
#include <linux/if_infiniband.h>
#include <linux/if_link.h>
#include <linux/inetdevice.h>
#include <linux/jiffies.h>
#include <linux/moduleparam.h>
#include <linux/netdevice.h>
#include <linux/rhashtable.h>
#include <linux/rtnetlink.h>
#include <linux/skbuff.h>
#include <linux/workqueue.h>
#include <net/addrconf.h>
#include <net/gso.h>
#include <net/netdev_lock.h>
#include <net/netdev_queues.h>
#include <net/page_pool/helpers.h>
#include <net/rtnetlink.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_cache.h>
#include <rdma/ib_cm.h>
#include <rdma/ib_sa.h>
#include <rdma/ib_verbs.h>

/* Macros that bindgen cannot evaluate. */
static const gfp_t RUST_CONST_HELPER_GFP_ATOMIC = GFP_ATOMIC;
static const gfp_t RUST_CONST_HELPER_GFP_KERNEL = GFP_KERNEL;
static const netdev_features_t RUST_CONST_HELPER_NETIF_F_SG = NETIF_F_SG;
static const netdev_features_t RUST_CONST_HELPER_NETIF_F_HIGHDMA = NETIF_F_HIGHDMA;
static const netdev_features_t RUST_CONST_HELPER_NETIF_F_IP_CSUM = NETIF_F_IP_CSUM;
static const netdev_features_t RUST_CONST_HELPER_NETIF_F_RXCSUM = NETIF_F_RXCSUM;
static const netdev_features_t RUST_CONST_HELPER_NETIF_F_TSO = NETIF_F_TSO;
static const netdev_features_t RUST_CONST_HELPER_NETIF_F_GSO_MASK = NETIF_F_GSO_MASK;
static const u32 RUST_CONST_HELPER_ETHTOOL_OP_NEEDS_RTNL_GLINK = ETHTOOL_OP_NEEDS_RTNL_GLINK;
static const unsigned long RUST_CONST_HELPER_HZ = HZ;
static const size_t RUST_CONST_HELPER_MAX_SKB_FRAGS = MAX_SKB_FRAGS;
static const gfp_t RUST_CONST_HELPER___GFP_NOWARN = __GFP_NOWARN;
static const unsigned int RUST_CONST_HELPER_PP_FLAG_DMA_MAP = PP_FLAG_DMA_MAP;
static const unsigned int RUST_CONST_HELPER_PP_FLAG_DMA_SYNC_DEV = PP_FLAG_DMA_SYNC_DEV;
static const netdev_features_t RUST_CONST_HELPER_NETIF_F_VLAN_CHALLENGED = NETIF_F_VLAN_CHALLENGED;
