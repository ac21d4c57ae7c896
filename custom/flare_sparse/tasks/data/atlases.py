"""Columns of the FreeSurfer tables that the morphometry tasks know, named as FreeSurfer names them."""

from __future__ import annotations

DESIKAN_REGIONS = """
MeanThickness bankssts caudalanteriorcingulate caudalmiddlefrontal cuneus entorhinal frontalpole fusiform
inferiorparietal inferiortemporal insula isthmuscingulate lateraloccipital lateralorbitofrontal lingual
medialorbitofrontal middletemporal paracentral parahippocampal parsopercularis parsorbitalis parstriangularis
pericalcarine postcentral posteriorcingulate precentral precuneus rostralanteriorcingulate rostralmiddlefrontal
superiorfrontal superiorparietal superiortemporal supramarginal temporalpole transversetemporal
"""
"""Cortical regions of Desikan et al. 2006, NeuroImage 31:968, with the mean of a hemisphere."""

DESTRIEUX_REGIONS = """
G_Ins_lg_and_S_cent_ins G_and_S_cingul-Ant G_and_S_cingul-Mid-Ant G_and_S_cingul-Mid-Post G_and_S_frontomargin
G_and_S_occipital_inf G_and_S_paracentral G_and_S_subcentral G_and_S_transv_frontopol G_cingul-Post-dorsal
G_cingul-Post-ventral G_cuneus G_front_inf-Opercular G_front_inf-Orbital G_front_inf-Triangul G_front_middle
G_front_sup G_insular_short G_oc-temp_lat-fusifor G_oc-temp_med-Lingual G_oc-temp_med-Parahip G_occipital_middle
G_occipital_sup G_orbital G_pariet_inf-Angular G_pariet_inf-Supramar G_parietal_sup G_postcentral G_precentral
G_precuneus G_rectus G_subcallosal G_temp_sup-G_T_transv G_temp_sup-Lateral G_temp_sup-Plan_polar
G_temp_sup-Plan_tempo G_temporal_inf G_temporal_middle Lat_Fis-ant-Horizont Lat_Fis-ant-Vertical Lat_Fis-post
MeanThickness Pole_occipital Pole_temporal S_calcarine S_central S_cingul-Marginalis S_circular_insula_ant
S_circular_insula_inf S_circular_insula_sup S_collat_transv_ant S_collat_transv_post S_front_inf S_front_middle
S_front_sup S_interm_prim-Jensen S_intrapariet_and_P_trans S_oc-temp_lat S_oc-temp_med_and_Lingual
S_oc_middle_and_Lunatus S_oc_sup_and_transversal S_occipital_ant S_orbital-H_Shaped S_orbital_lateral
S_orbital_med-olfact S_parieto_occipital S_pericallosal S_postcentral S_precentral-inf-part S_precentral-sup-part
S_suborbital S_subparietal S_temporal_inf S_temporal_sup S_temporal_transverse
"""
"""Cortical regions of Destrieux et al. 2010, NeuroImage 53:1, with the mean of a hemisphere."""

VOLUMES = """
Left-Lateral-Ventricle Left-Inf-Lat-Vent Left-Cerebellum-White-Matter Left-Cerebellum-Cortex Left-Thalamus-Proper
Left-Caudate Left-Putamen Left-Pallidum 3rd-Ventricle 4th-Ventricle Brain-Stem Left-Hippocampus Left-Amygdala CSF
Left-Accumbens-area Left-VentralDC Left-choroid-plexus Right-Lateral-Ventricle Right-Inf-Lat-Vent
Right-Cerebellum-White-Matter Right-Cerebellum-Cortex Right-Thalamus-Proper Right-Caudate Right-Putamen
Right-Pallidum Right-Hippocampus Right-Amygdala Right-Accumbens-area Right-VentralDC Right-choroid-plexus
WM-hypointensities Optic-Chiasm CC_Posterior CC_Mid_Posterior CC_Central CC_Mid_Anterior CC_Anterior lhCortexVol
rhCortexVol SubCortGrayVol TotalGrayVol SupraTentorialVol
"""
"""Subcortical and global volumes."""


def _name_thickness(regions: str) -> list[str]:
    return [f"{side}_{region}_thickness" for side in ("lh", "rh") for region in regions.split()]


ATLASES: dict[str, tuple[str, ...]] = {
    "destrieux": tuple(sorted(["ICV", *VOLUMES.split(), *_name_thickness(DESTRIEUX_REGIONS)])),
    "desikan": tuple(sorted(["ICV", *_name_thickness(DESIKAN_REGIONS)])),
}
"""Feature columns by atlas, in name order, which is their order in the network's input."""
