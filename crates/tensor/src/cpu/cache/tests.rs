//! Caches: bad shapes and complete copies.

use super::CpuCache;
use crate::{CacheShape, Error};

fn shape() -> CacheShape {
    CacheShape {
        kda_layers: 2,
        kda_heads: 2,
        kda_head_dim: 4,
        conv_kernel: 4,
        dsa_layers: 2,
        latent: 8,
        index_dim: 4,
        kpool: 4,
        slots: 3,
        pages: 2,
        max_draft: 2,
    }
}

#[test]
fn impossible_shapes_are_errors() {
    for bad in [
        CacheShape { kpool: 0, ..shape() },
        CacheShape { kpool: 7, ..shape() },
        CacheShape { conv_kernel: 0, ..shape() },
    ] {
        assert!(matches!(CpuCache::new(&bad), Err(Error::Capacity { .. })), "{bad:?}");
    }
    for huge in [
        CacheShape { pages: usize::MAX / 2, ..shape() },
        CacheShape { pages: usize::MAX >> 16, ..shape() },
        CacheShape { kda_head_dim: usize::MAX / 2, ..shape() },
    ] {
        assert!(matches!(CpuCache::new(&huge), Err(Error::Memory { .. })), "{huge:?}");
    }
}

#[test]
fn a_copy_takes_everything_the_slot_owns_and_nothing_else() {
    let mut cache = CpuCache::new(&shape()).unwrap();
    // Every value tells where it is.
    let fill = |cache: &mut CpuCache| {
        for layer in 0..2 {
            for slot in 0..3 {
                for head in 0..2 {
                    let mut unit = cache.unit(layer, slot, head);
                    let unit = &mut *unit;
                    let mut next = (layer * 100 + slot * 10 + head) as f32;
                    for part in [&mut unit.state, &mut unit.records, &mut unit.columns] {
                        part.fill_with(|| {
                            next += 0.001;
                            next
                        });
                    }
                }
            }
            let mut next = layer as f32;
            cache.dsa_mut(layer).unwrap().tails.fill_with(|| {
                next += 1.0;
                next
            });
        }
    };
    fill(&mut cache);
    let mut before = CpuCache::new(&shape()).unwrap();
    fill(&mut before);
    cache.copy_slot(0, 2).unwrap();
    let tail = (4 + 2) * 2 * 4;
    for layer in 0..2 {
        for (slot, source) in [(0, 0), (1, 1), (2, 0)] {
            for head in 0..2 {
                let (a, b) = (cache.unit(layer, slot, head), before.unit(layer, source, head));
                assert_eq!((&a.state, &a.records, &a.columns), (&b.state, &b.records, &b.columns));
            }
            let (a, b) = (&cache.dsa(layer).unwrap().tails, &before.dsa(layer).unwrap().tails);
            assert_eq!(a[slot * tail..(slot + 1) * tail], b[source * tail..(source + 1) * tail]);
        }
    }
    assert!(cache.copy_slot(1, 3).is_err());
    assert!(cache.read_state(2, 0).is_err());
    assert!(cache.read_state(0, 3).is_err());
}

#[test]
fn the_bytes_of_a_slot_and_a_page_are_what_is_allocated() {
    let bytes = |shape: &CacheShape| {
        let cache = CpuCache::new(shape).unwrap();
        let mut values = 0;
        for layer in 0..shape.kda_layers {
            for unit in &cache.kda[layer] {
                let unit = unit.lock().unwrap();
                values += unit.state.len() + unit.records.len() + unit.columns.len();
            }
        }
        for layer in &cache.dsa {
            values += layer.latents.len() + layer.pool_keys.len() + layer.tails.len();
        }
        values * size_of::<f32>()
    };
    let (base, slots, pages) = (shape(), CacheShape { slots: 4, ..shape() }, CacheShape { pages: 5, ..shape() });
    assert_eq!(bytes(&slots) - bytes(&base), CpuCache::slot_bytes(&base));
    assert_eq!(bytes(&pages) - bytes(&base), 3 * CpuCache::page_bytes(&base));
}
