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

#include <linux/bottom_half.h>
#include <linux/dma-mapping.h>
#include <linux/io.h>
#include <linux/irq_work.h>
#include <linux/irqflags.h>
#include <linux/smp.h>
#include <linux/workqueue.h>
#include <rdma/ib_verbs.h>

/* linux/bottom_half.h */

__helper void ibf_local_bh_disable(void)
{
	local_bh_disable();
}

__helper void ibf_local_bh_enable(void)
{
	local_bh_enable();
}

/* linux/dma-mapping.h */

__helper int ibf_dma_coerce_mask_and_coherent(struct device *dev, u64 mask)
{
	return dma_coerce_mask_and_coherent(dev, mask);
}

/* linux/io.h */

__helper void *ibf_phys_to_virt(phys_addr_t address)
{
	return phys_to_virt(address);
}

/* linux/irq_work.h */

__helper void ibf_init_irq_work(struct irq_work *work, void (*func)(struct irq_work *))
{
	init_irq_work(work, func);
}

/* linux/irqflags.h */

__helper bool ibf_irqs_disabled(void)
{
	return irqs_disabled();
}

/* linux/smp.h */

__helper unsigned int ibf_raw_smp_processor_id(void)
{
	return raw_smp_processor_id();
}

/* linux/workqueue.h */

__helper struct workqueue_struct *ibf_alloc_ordered_workqueue(const char *name)
{
	return alloc_ordered_workqueue("%s", WQ_MEM_RECLAIM, name);
}

/* rdma/ib_verbs.h */

__helper struct ib_device *ibf_ib_alloc_device(size_t size)
{
	return _ib_alloc_device(size, &init_net);
}

__helper u64 ibf_ib_dma_map_single(struct ib_device *dev, void *addr, size_t size,
				   enum dma_data_direction dir)
{
	return ib_dma_map_single(dev, addr, size, dir);
}

__helper void ibf_ib_dma_unmap_single(struct ib_device *dev, u64 addr, size_t size,
				      enum dma_data_direction dir)
{
	ib_dma_unmap_single(dev, addr, size, dir);
}

__helper int ibf_ib_dma_mapping_error(struct ib_device *dev, u64 addr)
{
	return ib_dma_mapping_error(dev, addr);
}
