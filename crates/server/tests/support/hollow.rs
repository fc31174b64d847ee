//! A backend that computes nothing: every result is zeros, and each step does what a script says. It stands for a device
//! that fails.

use glimmer_checkpoint::TensorData;
use glimmer_tensor::{
    Backend, CacheShape, Columns, DsaColumns, DsaWeights, Experts, IndexerWeights, KdaForm, KdaWeights, Linear,
    MatrixSource, MhcWeights, Norm, PatchGrid, Result, RouterRule, Step, Streams, Swiglu,
};

/// The script of its steps.
pub(crate) struct Hollow(pub(crate) Box<dyn FnMut() -> Result<()> + Send>);

impl std::fmt::Debug for Hollow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hollow")
    }
}

impl Backend for Hollow {
    type Matrix = ();
    type Vector = ();
    type Buffer = ();
    type Selection = ();
    type Routing = ();
    type Cache = ();

    fn matrix(&self, _: MatrixSource<'_>) -> Result<()> {
        Ok(())
    }

    fn vector(&self, _: &TensorData) -> Result<()> {
        Ok(())
    }

    fn matrix_from(&self, _: &str, _: usize, _: &[f32]) -> Result<()> {
        Ok(())
    }

    fn buffer(&self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn selection(&self, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn routing(&self, _: usize, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn cache(&self, _: &CacheShape) -> Result<()> {
        Ok(())
    }

    fn reserve(&mut self, _: usize, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn write(&self, _: &mut (), _: usize, _: &[f32]) -> Result<()> {
        Ok(())
    }

    fn read(&self, _: &(), _: usize, values: &mut [f32]) -> Result<()> {
        {
            values.fill(0.0);
            Ok(())
        }
    }

    fn read_selection(&self, _: &(), _: usize) -> Vec<u32> {
        Vec::new()
    }

    fn write_selection(&self, _: &mut (), _: usize, _: &[u32]) -> Result<()> {
        Ok(())
    }

    fn read_routing(&self, _: &(), _: usize) -> Vec<(u32, f32)> {
        Vec::new()
    }

    fn copy_slot(&self, _: &mut (), _: u32, _: u32) -> Result<()> {
        Ok(())
    }

    fn read_state(&self, _: &(), _: usize, _: u32) -> Result<Vec<f32>> {
        Ok(Vec::new())
    }

    fn begin(&mut self, _: &Step) -> Result<()> {
        self.0()
    }

    fn embed(&mut self, _: &(), _: &(), _: &mut Streams<Self>, _: usize) -> Result<()> {
        Ok(())
    }

    fn mhc(
        &mut self,
        _: usize,
        _: &MhcWeights<Self>,
        _: &Norm<Self>,
        _: Option<&()>,
        _: &mut Streams<Self>,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn mhc_head(&mut self, _: usize, _: &Norm<Self>, _: &(), _: &mut Streams<Self>, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn linear(&mut self, _: usize, _: Columns<'_, Self>, _: &[&Linear<Self>], _: &mut (), _: usize) -> Result<()> {
        Ok(())
    }

    fn kda(
        &mut self,
        _: &KdaWeights<Self>,
        _: KdaForm,
        _: &(),
        _: &(),
        _: &mut (),
        _: usize,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn dsa_write(
        &mut self,
        _: &DsaWeights<Self>,
        _: DsaColumns,
        _: &(),
        _: bool,
        _: &mut (),
        _: usize,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn dsa_select(
        &mut self,
        _: &IndexerWeights<Self>,
        _: DsaColumns,
        _: Columns<'_, Self>,
        _: &(),
        _: &(),
        _: usize,
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn copy_selection(&mut self, _: &(), _: &[u32], _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn mla(&mut self, _: &DsaWeights<Self>, _: Columns<'_, Self>, _: &(), _: &(), _: usize, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn swiglu(&mut self, _: usize, _: &Swiglu<Self>, _: f32, _: &(), _: &mut (), _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn route(&mut self, _: usize, _: &(), _: &(), _: RouterRule, _: &(), _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn moe_up(&mut self, _: usize, _: &Experts<Self>, _: &(), _: &(), _: &mut (), _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn moe_down(&mut self, _: usize, _: &Experts<Self>, _: &(), _: &(), _: &(), _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn mtp_input(&mut self, _: &(), _: &Norm<Self>, _: &Norm<Self>, _: &(), _: &[u32], _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn add_norm(&mut self, _: usize, _: Option<&()>, _: &Norm<Self>, _: &mut (), _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn head(&mut self, _: &(), _: &[u32], _: &(), _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn vision_attention(
        &mut self,
        _: PatchGrid,
        _: usize,
        _: &Norm<Self>,
        _: &Norm<Self>,
        _: &(),
        _: &mut (),
    ) -> Result<()> {
        Ok(())
    }

    fn group_rows(&mut self, _: usize, _: usize, _: &(), _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn norm_gelu(&mut self, _: usize, _: &Norm<Self>, _: &mut ()) -> Result<()> {
        Ok(())
    }

    fn copy_row(&mut self, _: &(), _: usize, _: &mut (), _: usize) -> Result<()> {
        Ok(())
    }
}
