// SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
/*
 * Inline functions and macros that Rust cannot call, one function each, no
 * logic. Sorted by header.
 */

#include <linux/compiler_types.h>

#if defined(CONFIG_RUST_INLINE_HELPERS) && !defined(__BINDGEN__)
#define __helper __always_inline
#else
#define __helper
#endif

#include <linux/icmpv6.h>
#include <linux/if_infiniband.h>
#include <linux/inetdevice.h>
#include <linux/jiffies.h>
#include <linux/netdevice.h>
#include <linux/rhashtable.h>
#include <linux/rtnetlink.h>
#include <linux/sched/signal.h>
#include <linux/skbuff.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>
#include <net/dst.h>
#include <net/icmp.h>
#include <net/if_inet6.h>
#include <net/ip.h>
#include <net/netdev_lock.h>
#include <net/netlink.h>
#include <net/page_pool/helpers.h>
#include <net/rtnetlink.h>
#include <rdma/ib_addr.h>
#include <rdma/ib_cm.h>
#include <rdma/ib_verbs.h>

/* linux/icmpv6.h */

__helper void ipoib_rs_icmpv6_send(struct sk_buff *skb, u8 type, u8 code, u32 info)
{
	icmpv6_send(skb, type, code, info);
}

/* linux/inetdevice.h */

__helper struct in_device *ipoib_rs_in_dev_get_rcu(const struct net_device *dev)
{
	return __in_dev_get_rcu(dev);
}

/* linux/jiffies.h */

__helper unsigned long ipoib_rs_jiffies(void)
{
	return jiffies;
}

/* linux/netdevice.h */

__helper void *ipoib_rs_netdev_priv(const struct net_device *dev)
{
	return netdev_priv(dev);
}

__helper void ipoib_rs_netdev_lockdep_set_classes(struct net_device *dev)
{
	netdev_lockdep_set_classes(dev);
}

__helper void ipoib_rs_dev_net_set(struct net_device *dev, struct net *net)
{
	dev_net_set(dev, net);
}

__helper struct net *ipoib_rs_dev_net(const struct net_device *dev)
{
	return dev_net(dev);
}

__helper struct net *ipoib_rs_maybe_get_net(struct net *net)
{
	return maybe_get_net(net);
}

__helper void ipoib_rs_put_net(struct net *net)
{
	put_net(net);
}

__helper void ipoib_rs_dev_hold(struct net_device *dev)
{
	dev_hold(dev);
}

__helper void ipoib_rs_dev_put(struct net_device *dev)
{
	dev_put(dev);
}

__helper void ipoib_rs_netif_keep_dst(struct net_device *dev)
{
	netif_keep_dst(dev);
}

__helper bool ipoib_rs_netif_running(const struct net_device *dev)
{
	return netif_running(dev);
}

__helper bool ipoib_rs_netif_carrier_ok(const struct net_device *dev)
{
	return netif_carrier_ok(dev);
}

__helper void ipoib_rs_netif_start_queue(struct net_device *dev)
{
	netif_start_queue(dev);
}

__helper void ipoib_rs_netif_stop_queue(struct net_device *dev)
{
	netif_stop_queue(dev);
}

__helper void ipoib_rs_netif_wake_queue(struct net_device *dev)
{
	netif_wake_queue(dev);
}

__helper bool ipoib_rs_netif_queue_stopped(const struct net_device *dev)
{
	return netif_queue_stopped(dev);
}

__helper void ipoib_rs_netif_tx_disable(struct net_device *dev)
{
	netif_tx_disable(dev);
}

__helper void ipoib_rs_netif_trans_update(struct net_device *dev)
{
	netif_trans_update(dev);
}

__helper void ipoib_rs_netif_tx_lock_bh(struct net_device *dev)
{
	__netif_tx_lock_bh(netdev_get_tx_queue(dev, 0));
}

__helper void ipoib_rs_netif_tx_unlock_bh(struct net_device *dev)
{
	__netif_tx_unlock_bh(netdev_get_tx_queue(dev, 0));
}

__helper bool ipoib_rs_netdev_sent_queue(struct net_device *dev, unsigned int bytes, bool more)
{
	return __netdev_sent_queue(dev, bytes, more);
}

__helper void ipoib_rs_netdev_completed_queue(struct net_device *dev, unsigned int pkts,
					      unsigned int bytes)
{
	netdev_completed_queue(dev, pkts, bytes);
}

__helper void ipoib_rs_netdev_reset_queue(struct net_device *dev)
{
	netdev_reset_queue(dev);
}

__helper bool ipoib_rs_netdev_xmit_more(void)
{
	return netdev_xmit_more();
}

__helper void ipoib_rs_netif_addr_lock_bh(struct net_device *dev)
{
	netif_addr_lock_bh(dev);
}

__helper void ipoib_rs_netif_addr_unlock_bh(struct net_device *dev)
{
	netif_addr_unlock_bh(dev);
}

__helper gro_result_t ipoib_rs_napi_gro_receive(struct napi_struct *napi, struct sk_buff *skb)
{
	return napi_gro_receive(napi, skb);
}

__helper void ipoib_rs_napi_schedule(struct napi_struct *napi)
{
	napi_schedule(napi);
}

/* linux/bottom_half.h */

__helper void ipoib_rs_local_bh_disable(void)
{
	local_bh_disable();
}

__helper void ipoib_rs_local_bh_enable(void)
{
	local_bh_enable();
}

/* linux/rhashtable.h */

__helper int ipoib_rs_rhashtable_init(struct rhashtable *ht, const struct rhashtable_params *params)
{
	return rhashtable_init(ht, params);
}

__helper void *ipoib_rs_rhashtable_lookup(struct rhashtable *ht, const void *key,
					  const struct rhashtable_params *params)
{
	return rhashtable_lookup(ht, key, *params);
}

__helper void *ipoib_rs_rhashtable_lookup_get_insert_fast(struct rhashtable *ht,
							  struct rhash_head *obj,
							  const struct rhashtable_params *params)
{
	return rhashtable_lookup_get_insert_fast(ht, obj, *params);
}

__helper int ipoib_rs_rhashtable_remove_fast(struct rhashtable *ht, struct rhash_head *obj,
					     const struct rhashtable_params *params)
{
	return rhashtable_remove_fast(ht, obj, *params);
}

__helper void ipoib_rs_rhashtable_walk_start(struct rhashtable_iter *iter)
{
	rhashtable_walk_start(iter);
}

/* linux/sched/signal.h */

__helper int ipoib_rs_restart_syscall(void)
{
	return restart_syscall();
}

/* net/rtnetlink.h */

__helper struct net *ipoib_rs_rtnl_newlink_link_net(struct rtnl_newlink_params *params)
{
	return rtnl_newlink_link_net(params);
}

/* linux/skbuff.h */

__helper struct sk_buff *ipoib_rs_alloc_skb(unsigned int size, gfp_t gfp)
{
	return alloc_skb(size, gfp);
}

__helper unsigned int ipoib_rs_skb_headlen(const struct sk_buff *skb)
{
	return skb_headlen(skb);
}

__helper struct skb_shared_info *ipoib_rs_skb_shinfo(const struct sk_buff *skb)
{
	return skb_shinfo(skb);
}

__helper struct page *ipoib_rs_skb_frag_page(const skb_frag_t *frag)
{
	return skb_frag_page(frag);
}

__helper unsigned int ipoib_rs_skb_frag_off(const skb_frag_t *frag)
{
	return skb_frag_off(frag);
}

__helper unsigned int ipoib_rs_skb_frag_size(const skb_frag_t *frag)
{
	return skb_frag_size(frag);
}

__helper bool ipoib_rs_skb_frags_readable(const struct sk_buff *skb)
{
	return skb_frags_readable(skb);
}

__helper bool ipoib_rs_skb_is_gso(const struct sk_buff *skb)
{
	return skb_is_gso(skb);
}

__helper bool ipoib_rs_skb_transport_header_was_set(const struct sk_buff *skb)
{
	return skb_transport_header_was_set(skb);
}

__helper int ipoib_rs_skb_transport_offset(const struct sk_buff *skb)
{
	return skb_transport_offset(skb);
}

__helper bool ipoib_rs_pskb_may_pull(struct sk_buff *skb, unsigned int len)
{
	return pskb_may_pull(skb, len);
}

__helper void ipoib_rs_skb_reset_mac_header(struct sk_buff *skb)
{
	skb_reset_mac_header(skb);
}

__helper void ipoib_rs_skb_add_rx_frag(struct sk_buff *skb, int i, struct page *page, int off,
				       int size, unsigned int truesize)
{
	skb_add_rx_frag(skb, i, page, off, size, truesize);
}

__helper void ipoib_rs_skb_mark_for_recycle(struct sk_buff *skb)
{
	skb_mark_for_recycle(skb);
}

__helper int ipoib_rs_skb_linearize(struct sk_buff *skb)
{
	return skb_linearize(skb);
}

__helper int ipoib_rs_skb_cow_head(struct sk_buff *skb, unsigned int headroom)
{
	return skb_cow_head(skb, headroom);
}

__helper void ipoib_rs_skb_tx_timestamp(struct sk_buff *skb)
{
	skb_tx_timestamp(skb);
}

__helper void ipoib_rs_skb_record_rx_queue(struct sk_buff *skb, u16 queue)
{
	skb_record_rx_queue(skb, queue);
}

__helper void ipoib_rs_skb_orphan(struct sk_buff *skb)
{
	skb_orphan(skb);
}

__helper void ipoib_rs_skb_dst_drop(struct sk_buff *skb)
{
	skb_dst_drop(skb);
}

__helper void ipoib_rs_dev_kfree_skb_any(struct sk_buff *skb)
{
	dev_kfree_skb_any(skb);
}

__helper void ipoib_rs___skb_queue_head_init(struct sk_buff_head *list)
{
	__skb_queue_head_init(list);
}

__helper void ipoib_rs___skb_queue_tail(struct sk_buff_head *list, struct sk_buff *skb)
{
	__skb_queue_tail(list, skb);
}

__helper void ipoib_rs___skb_queue_head(struct sk_buff_head *list, struct sk_buff *skb)
{
	__skb_queue_head(list, skb);
}

__helper struct sk_buff *ipoib_rs___skb_dequeue(struct sk_buff_head *list)
{
	return __skb_dequeue(list);
}

/* linux/spinlock.h */

__helper void ipoib_rs_spin_lock_bh(spinlock_t *lock)
{
	spin_lock_bh(lock);
}

__helper void ipoib_rs_spin_unlock_bh(spinlock_t *lock)
{
	spin_unlock_bh(lock);
}

__helper int ipoib_rs_spin_trylock_bh(spinlock_t *lock)
{
	return spin_trylock_bh(lock);
}

__helper void ipoib_rs_spin_assert_is_held(spinlock_t *lock)
{
	lockdep_assert_held(lock);
}

/* linux/workqueue.h */

__helper struct workqueue_struct *ipoib_rs_alloc_ordered_workqueue(const char *name,
								   bool reclaims)
{
	return alloc_ordered_workqueue("%s", reclaims ? WQ_MEM_RECLAIM : 0, name);
}

/* net/dst.h */

__helper void ipoib_rs_skb_dst_update_pmtu(struct sk_buff *skb, u32 mtu)
{
	skb_dst_update_pmtu(skb, mtu);
}

/* net/icmp.h */

__helper void ipoib_rs_icmp_send(struct sk_buff *skb, int type, int code, __be32 info)
{
	icmp_send(skb, type, code, info);
}

/* net/if_inet6.h, net/ip.h */

__helper void ipoib_rs_ip_ib_mc_map(__be32 group, const unsigned char *broadcast, char *address)
{
	ip_ib_mc_map(group, broadcast, address);
}

__helper void ipoib_rs_ipv6_ib_mc_map(const struct in6_addr *group, const unsigned char *broadcast,
				      char *address)
{
	ipv6_ib_mc_map(group, broadcast, address);
}

/* net/netdev_lock.h */

__helper void ipoib_rs_netdev_lock(struct net_device *dev)
{
	netdev_lock(dev);
}

__helper void ipoib_rs_netdev_unlock(struct net_device *dev)
{
	netdev_unlock(dev);
}

/* net/netlink.h */

__helper int ipoib_rs_nla_put_u16(struct sk_buff *skb, int type, u16 value)
{
	return nla_put_u16(skb, type, value);
}

__helper u32 ipoib_rs_nla_get_u32(const struct nlattr *nla)
{
	return nla_get_u32(nla);
}

__helper u16 ipoib_rs_nla_get_u16(const struct nlattr *nla)
{
	return nla_get_u16(nla);
}

__helper size_t ipoib_rs_nla_total_size(int payload)
{
	return nla_total_size(payload);
}

__helper void ipoib_rs_nl_set_err_msg(struct netlink_ext_ack *extack, const char *msg)
{
	NL_SET_ERR_MSG_FMT(extack, "%s", msg);
}

/* net/page_pool/helpers.h */

__helper struct page *ipoib_rs_page_pool_alloc_page(struct page_pool *pool, gfp_t gfp)
{
	return page_pool_alloc_pages(pool, gfp);
}

__helper void ipoib_rs_page_pool_put_page(struct page_pool *pool, struct page *page, bool direct)
{
	page_pool_put_full_page(pool, page, direct);
}

__helper dma_addr_t ipoib_rs_page_pool_get_dma_addr(const struct page *page)
{
	return page_pool_get_dma_addr(page);
}

__helper void *ipoib_rs_page_address(const struct page *page)
{
	return page_address(page);
}

/* rdma/ib_addr.h */

__helper void ipoib_rs_rdma_gid2ip(struct sockaddr *out, const union ib_gid *gid)
{
	rdma_gid2ip(out, gid);
}

/* rdma/ib_cm.h: bindgen places this bit field elsewhere than C. */

__helper u8 ipoib_rs_cm_req_rnr_retry_count(const struct ib_cm_req_event_param *request)
{
	return request->rnr_retry_count;
}

/* rdma/ib_verbs.h */

__helper u64 ipoib_rs_ib_dma_map_single(struct ib_device *dev, void *addr, size_t size,
					enum dma_data_direction dir)
{
	return ib_dma_map_single(dev, addr, size, dir);
}

__helper void ipoib_rs_ib_dma_unmap_single(struct ib_device *dev, u64 addr, size_t size,
					   enum dma_data_direction dir)
{
	ib_dma_unmap_single(dev, addr, size, dir);
}

__helper u64 ipoib_rs_ib_dma_map_page(struct ib_device *dev, struct page *page,
				      unsigned long offset, size_t size,
				      enum dma_data_direction dir)
{
	return ib_dma_map_page(dev, page, offset, size, dir);
}

__helper void ipoib_rs_ib_dma_unmap_page(struct ib_device *dev, u64 addr, size_t size,
					 enum dma_data_direction dir)
{
	ib_dma_unmap_page(dev, addr, size, dir);
}

__helper int ipoib_rs_ib_dma_mapping_error(struct ib_device *dev, u64 addr)
{
	return ib_dma_mapping_error(dev, addr);
}

__helper bool ipoib_rs_ib_dma_need_sync(struct ib_device *dev)
{
	return !ib_uses_virt_dma(dev) && dma_dev_need_sync(dev->dma_device);
}

__helper void ipoib_rs_ib_dma_sync_single_for_cpu(struct ib_device *dev, u64 addr, size_t size,
						  enum dma_data_direction dir)
{
	ib_dma_sync_single_for_cpu(dev, addr, size, dir);
}

__helper void ipoib_rs_ib_dma_sync_single_for_device(struct ib_device *dev, u64 addr, size_t size,
						     enum dma_data_direction dir)
{
	ib_dma_sync_single_for_device(dev, addr, size, dir);
}

__helper int ipoib_rs_ib_req_notify_cq(struct ib_cq *cq, enum ib_cq_notify_flags flags)
{
	return ib_req_notify_cq(cq, flags);
}

__helper bool ipoib_rs_rdma_cap_ib_cm(const struct ib_device *dev, u32 port)
{
	return rdma_cap_ib_cm(dev, port);
}

__helper bool ipoib_rs_rdma_protocol_ib(const struct ib_device *dev, u32 port)
{
	return rdma_protocol_ib(dev, port);
}

__helper bool ipoib_rs_rdma_protocol_roce(const struct ib_device *dev, u32 port)
{
	return rdma_protocol_roce(dev, port);
}

__helper enum rdma_ah_attr_type ipoib_rs_rdma_ah_find_type(struct ib_device *dev, u32 port)
{
	return rdma_ah_find_type(dev, port);
}

__helper u32 ipoib_rs_rdma_start_port(const struct ib_device *dev)
{
	return rdma_start_port(dev);
}

__helper u32 ipoib_rs_rdma_end_port(const struct ib_device *dev)
{
	return rdma_end_port(dev);
}

__helper struct net *ipoib_rs_rdma_dev_net(struct ib_device *dev)
{
	return rdma_dev_net(dev);
}

__helper void ipoib_rs_ib_set_client_data(struct ib_device *dev, struct ib_client *client,
					  void *data)
{
	ib_set_client_data(dev, client, data);
}

__helper const char *ipoib_rs_ib_device_name(const struct ib_device *dev)
{
	return dev_name(&dev->dev);
}

__helper bool ipoib_rs_ib_device_try_get(struct ib_device *dev)
{
	return ib_device_try_get(dev);
}

__helper void
ipoib_rs_INIT_IB_EVENT_HANDLER(struct ib_event_handler *handler, struct ib_device *dev,
			       void (*fn)(struct ib_event_handler *, struct ib_event *))
{
	INIT_IB_EVENT_HANDLER(handler, dev, fn);
}
